"""Reports of a finished run: in a terminal, as a page, and as a bundle to hand over.

What a report says of privacy is computed in `statements`; here it is only laid out.
"""

"""What is done to a reply before it leaves its client, how sums are formed, and what all of it cost
in privacy.
"""

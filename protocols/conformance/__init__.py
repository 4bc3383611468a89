"""What every protocol must keep: `check` runs all checks, each with a sentence.

Single checks are functions that take a way to make a protocol, for tests of one's own; they raise
`ConformanceError`, an AssertionError, with a sentence that says what to do.
"""

from securecluster.protocols.conformance.checks import CHECKS, check, small_clients, small_params
from securecluster.protocols.conformance.fresh_process import check_in_new_process
from securecluster.protocols.conformance.neighbours import other_data
from securecluster.protocols.conformance.privacy import (
    SPREAD,
    check_events,
    check_free_replies,
    check_newcomers_price,
    check_priced,
    check_target,
    events_owed,
    events_written,
    is_same,
)
from securecluster.protocols.conformance.report import (
    ConformanceError,
    NotApplicableError,
    Report,
    Result,
)
from securecluster.protocols.conformance.runs import (
    Example,
    check_everyone_catches_up,
    check_frames,
    check_masked_round,
    check_newcomers,
    check_nodes,
    check_repeats,
    check_replay,
    check_resume,
    check_saved,
    check_secure_sums,
    example,
)
from securecluster.protocols.conformance.worlds import check_worlds

__all__ = [
    "CHECKS",
    "SPREAD",
    "ConformanceError",
    "Example",
    "NotApplicableError",
    "Report",
    "Result",
    "check",
    "check_events",
    "check_everyone_catches_up",
    "check_frames",
    "check_free_replies",
    "check_in_new_process",
    "check_masked_round",
    "check_newcomers",
    "check_newcomers_price",
    "check_nodes",
    "check_priced",
    "check_repeats",
    "check_replay",
    "check_resume",
    "check_saved",
    "check_secure_sums",
    "check_target",
    "check_worlds",
    "events_owed",
    "events_written",
    "example",
    "is_same",
    "other_data",
    "small_clients",
    "small_params",
]

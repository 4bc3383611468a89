"""The names of this package with their types, which it reads from here."""

from securecluster.protocols.conformance.checks import CHECKS as CHECKS
from securecluster.protocols.conformance.checks import check as check
from securecluster.protocols.conformance.checks import small_clients as small_clients
from securecluster.protocols.conformance.checks import small_params as small_params
from securecluster.protocols.conformance.fresh_process import (
    check_in_new_process as check_in_new_process,
)
from securecluster.protocols.conformance.neighbours import other_data as other_data
from securecluster.protocols.conformance.privacy import SPREAD as SPREAD
from securecluster.protocols.conformance.privacy import check_events as check_events
from securecluster.protocols.conformance.privacy import check_free_replies as check_free_replies
from securecluster.protocols.conformance.privacy import (
    check_newcomers_price as check_newcomers_price,
)
from securecluster.protocols.conformance.privacy import check_priced as check_priced
from securecluster.protocols.conformance.privacy import check_target as check_target
from securecluster.protocols.conformance.privacy import events_owed as events_owed
from securecluster.protocols.conformance.privacy import events_written as events_written
from securecluster.protocols.conformance.privacy import is_same as is_same
from securecluster.protocols.conformance.report import ConformanceError as ConformanceError
from securecluster.protocols.conformance.report import NotApplicableError as NotApplicableError
from securecluster.protocols.conformance.report import Report as Report
from securecluster.protocols.conformance.report import Result as Result
from securecluster.protocols.conformance.runs import Example as Example
from securecluster.protocols.conformance.runs import (
    check_everyone_catches_up as check_everyone_catches_up,
)
from securecluster.protocols.conformance.runs import check_frames as check_frames
from securecluster.protocols.conformance.runs import check_masked_round as check_masked_round
from securecluster.protocols.conformance.runs import check_newcomers as check_newcomers
from securecluster.protocols.conformance.runs import check_nodes as check_nodes
from securecluster.protocols.conformance.runs import check_repeats as check_repeats
from securecluster.protocols.conformance.runs import check_replay as check_replay
from securecluster.protocols.conformance.runs import check_resume as check_resume
from securecluster.protocols.conformance.runs import check_saved as check_saved
from securecluster.protocols.conformance.runs import check_secure_sums as check_secure_sums
from securecluster.protocols.conformance.runs import example as example
from securecluster.protocols.conformance.worlds import check_worlds as check_worlds

"""Planted faults: a rehearsal that cannot fail shows nothing. Each strikes rank 1."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        says: what it does, for people.
        kill_at: the event of rank 1 at which the rank is killed.
        variables: set for rank 1 alone.
        keeps_port: somebody else listens on the rendezvous port.
    """

    says: str
    kill_at: str | None = None
    variables: dict[str, str] = field(default_factory=dict)
    keeps_port: bool = False


#: Name on the command line: fault.
FAULTS = {
    "kill-start": Fault("a rank is killed while it starts", kill_at="starting"),
    "kill-serving": Fault("a rank is killed while it serves", kill_at="served"),
    "environment": Fault(
        "a rank has another setting", variables={"VLLM_DCP_MLA_MERGE_LIMIT_BYTES": "1048576"}
    ),
    "no-plugin": Fault("a rank has no plugin", variables={"VLLM_PLUGINS": "none"}),
    "port-taken": Fault("the rendezvous port is taken", keeps_port=True),
}

"""Runs an engine's ranks as processes, watches them, and leaves none behind."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import mps
from .engine import EngineSpec, environment
from .faults import Fault
from .machine import MachineError
from .placement import visible
from .processes import end_family, kill
from .rank import RankFiles
from .requests import Requests

#: For a rank to end by itself after its last event.
_EXIT_SECONDS = 30
#: For the ranks of a stuck engine to write their stacks.
_STACK_SECONDS = 2
_STACK_LINES = 40
_CONNECTION_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT = 10_000
_PORTS_TRIED = 100
#: What Python, CUDA's allocator and faulthandler print of an error.
_ERROR = re.compile(
    r"[\w.]*(?:Error|Exception|Interrupt)(?:: .*)?|Fatal Python error: .*|.*out of memory.*"
)
#: Before each line of an exception, once torch.distributed knows its rank.
_RANK = re.compile(r"^\[rank\d+\]:")
#: Last event: when a rank ended.
_WHEN = {
    None: "before it started",
    "starting": "while it started",
    "ready": "before its first request was served",
    "served": "while it served",
    "alone": "while it served requests alone",
    "soaked": "while it soaked",
    "done": "after it was done",
}


class EngineError(RuntimeError):
    """An engine that did not answer; the message says which rank, where and why."""


@dataclass(slots=True)
class Engine:
    """A running engine; :meth:`poll` until it gives results.

    Attributes:
        spec: what runs.
        folder: its files.
        deadline: of ``time.monotonic``.
        fault: planted into rank 1, None for none.
        command: of a rank; the engine's folder and this process's id follow.
    """

    spec: EngineSpec
    folder: Path
    deadline: float
    fault: Fault | None
    command: tuple[str, ...] = (sys.executable, "-m", f"{__package__}.rank")
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    _held: socket.socket | None = None
    _service: mps.MultiProcessService | None = None
    _port: int = 0
    _struck: float | None = None

    def start(self, requests: Requests, gpus: tuple[int, ...], ranks_per_gpu: int) -> None:
        """Starts every rank; ``ranks_per_gpu`` of them share each of the GPUs.

        Raises:
            .machine.MachineError: no port is free.
        """
        self.folder.mkdir(mode=0o700)
        (self.folder / "engine.json").write_text(self.spec.model_dump_json())
        (self.folder / "requests.json").write_text(requests.model_dump_json())
        self._held, self._port = _free_port()
        if self.fault is None or not self.fault.keeps_port:
            self._held.close()
        common = {**os.environ, **visible(gpus)}
        if self.spec.shared and self.spec.world > 1:
            if self.spec.whole_gpu:
                common |= mps.unused(self.folder)
            else:
                self._service = mps.MultiProcessService(self.folder / "mps")
                common |= self._service.start(gpus)
        for rank in range(self.spec.world):
            variables = {
                **common,
                **environment(self.spec, rank, rank // ranks_per_gpu, self._port),
                **(self.fault.variables if self.fault is not None and rank == 1 else {}),
            }
            with self._files(rank).log.open("wb") as log:
                self.processes.append(
                    subprocess.Popen(
                        [*self.command, str(self.folder), str(os.getpid())],
                        env=variables,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )

    def poll(self) -> list[dict[str, Any]] | None:
        """Every rank's result once all have ended, None before.

        Raises:
            EngineError: a rank died or the time is up; all ranks have been ended then.
        """
        self._plant()
        statuses = [process.poll() for process in self.processes]
        done = [self._event(rank) == "done" for rank in range(self.spec.world)]
        dead = {
            rank: status
            for rank, status in enumerate(statuses)
            if status is not None and (status != 0 or not done[rank])
        }
        if dead:
            raise self._fail(self._deaths(dead))
        if all(status == 0 for status in statuses):
            self.end()
            return self._results()
        now = time.monotonic()
        if all(done):
            # Results are there; a rank that hangs while it tears NCCL down is no failure of ours.
            self.deadline = min(self.deadline, now + _EXIT_SECONDS)
            if now >= self.deadline:
                self.end()
                return self._results()
        elif now >= self.deadline:
            raise self._fail(self._stuck())
        return None

    def is_ready(self) -> bool:
        """Whether the first rank has started."""
        return self._files(0).last_event().get("event") not in (None, "starting")

    def progress(self) -> str:
        """What the first rank does."""
        event = self._files(0).last_event()
        match event.get("event"):
            case None | "starting":
                return f"{self.spec.name}: starting"
            case "served":
                return f"{self.spec.name}: {event['done']} of {event['of']} requests"
            case name:
                return f"{self.spec.name}: {name}"

    def end(self) -> None:
        """Ends every process of the engine, and those that they started."""
        if self._held is not None:
            self._held.close()
        for process in self.processes:
            end_family(process)
        if self._service is not None:
            self._service.stop()

    def _plant(self) -> None:
        if self.fault is None or self.fault.kill_at is None or self.spec.world == 1:
            return
        if self._event(1) == self.fault.kill_at and self._struck is None:
            kill(self.processes[1].pid)
            self._struck = time.monotonic()

    def _fail(self, reason: str) -> EngineError:
        self.end()
        return EngineError(f"{self.spec.name}: {reason}")

    def _deaths(self, dead: dict[int, int]) -> str:
        """Who ended with which status and when, what every rank says, and where the logs are."""
        ends = [
            f"rank {rank} {_how(status)} {_when(self._event(rank))}"
            for rank, status in dead.items()
        ]
        # A rank whose peer is gone dies of that, and may do so first: all are heard.
        said: dict[str, list[int]] = {}
        for rank in (*dead, *(r for r in range(self.spec.world) if r not in dead)):
            if text := error_of(self._files(rank).log):
                said.setdefault(text.rstrip("."), []).append(rank)
        return " ".join(
            [
                "; ".join(ends) + ".",
                *([] if self._struck is None else [_seconds_since(self._struck)]),
                *(f"{_ranks(ranks)}: {text}." for text, ranks in said.items()),
                f"Logs: {', '.join(str(self._files(rank).log) for rank in dead)}.",
            ]
        )

    def _stuck(self) -> str:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGUSR1)
        time.sleep(_STACK_SECONDS)
        lines = [f"not done after {time.monotonic() - self.started:.0f} s."]
        for rank in range(self.spec.world):
            files = self._files(rank)
            last = _text(files.last_collective).strip() or "none"
            lines.append(f"Rank {rank}, {self._doing(rank)}; last collective {last}; its stack:")
            lines += _current_first(_text(files.stack)).splitlines()[:_STACK_LINES]
        return "\n".join(lines)

    def _doing(self, rank: int) -> str:
        event = self._files(rank).last_event()
        return " ".join(str(value) for value in event.values()) or "before it started"

    def _event(self, rank: int) -> str | None:
        return self._files(rank).last_event().get("event")

    def _results(self) -> list[dict[str, Any]]:
        return [json.loads(self._files(rank).result.read_text()) for rank in range(self.spec.world)]

    def _files(self, rank: int) -> RankFiles:
        return RankFiles(self.folder, rank)


def error_of(log: Path) -> str:
    """The last error that a log names, empty without one."""
    lines = [_RANK.sub("", line).strip() for line in _text(log).splitlines()]
    error = ""
    for number, line in enumerate(lines):
        if _ERROR.fullmatch(line):
            error = " ".join([line, *_details(line, lines[number + 1 :])])
    return error


def _details(line: str, following: list[str]) -> list[str]:
    """What is wrong, in the lines behind an error's first: Pydantic's next one, or a list's."""
    if "validation error" in line:
        return following[:1]
    return list(itertools.takewhile(lambda text: text.startswith("- "), following))


def _how(status: int) -> str:
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}" if status else "ended without a result"


def _when(event: str | None) -> str:
    return _WHEN.get(event, f"after {event!r}")


def _seconds_since(struck: float) -> str:
    return f"Noticed {time.monotonic() - struck:.1f} s after it was planted."


def _ranks(ranks: list[int]) -> str:
    numbers = ", ".join(map(str, ranks))
    return f"Rank {numbers} says" if len(ranks) == 1 else f"Ranks {numbers} say"


def _current_first(stacks: str) -> str:
    """faulthandler's stacks of all threads, with the one that hangs before the others."""
    threads = stacks.strip("\n").split("\n\n")
    return "\n\n".join(sorted(threads, key=lambda text: not text.startswith("Current thread")))


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""


def _free_port() -> tuple[socket.socket, int]:
    """A port that is held, below those that Linux gives to connections where it leaves some.

    The rank that listens on it comes half a minute later, while other engines connect.

    Raises:
        MachineError: none is free.
    """
    lowest = next(iter(_text(_CONNECTION_PORTS).split()), "0")
    quiet = range(_FIRST_PORT, int(lowest))
    tried = random.SystemRandom().sample(quiet, min(_PORTS_TRIED, len(quiet)))
    for port in (*tried, 0):  # 0: any that Linux would give
        held = socket.socket()
        try:
            held.bind(("127.0.0.1", port))
        except OSError:
            held.close()
            continue
        held.listen()
        return held, held.getsockname()[1]
    raise MachineError("no port of 127.0.0.1 is free for ranks to meet at; end what holds them.")

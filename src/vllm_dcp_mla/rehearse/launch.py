"""Runs an engine's ranks as processes, watches them, and leaves none behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .engine import EngineSpec, environment
from .faults import Fault
from .mps import MultiProcessService
from .placement import visible
from .processes import end_family, kill
from .rank import RankFiles
from .requests import Requests

#: For a rank to end by itself after its last event.
_EXIT_SECONDS = 30
#: For the ranks of a stuck engine to write their stacks.
_STACK_SECONDS = 2
_LOG_LINES = 6
_ERROR = re.compile(r"(?:^|\b)\w*(?:Error|Exception|SystemExit)\b.*: .*|.*out of memory.*")


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
        command: of a rank; the engine's folder follows.
    """

    spec: EngineSpec
    folder: Path
    deadline: float
    fault: Fault | None
    command: tuple[str, ...] = (sys.executable, "-m", f"{__package__}.rank")
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    _held: socket.socket | None = None
    _service: MultiProcessService | None = None
    _port: int = 0

    def start(self, requests: Requests, gpus: tuple[int, ...], ranks_per_gpu: int) -> None:
        """Starts every rank; ``ranks_per_gpu`` of them share each of the GPUs."""
        self.folder.mkdir(mode=0o700)
        (self.folder / "engine.json").write_text(self.spec.model_dump_json())
        (self.folder / "requests.json").write_text(requests.model_dump_json())
        self._held, self._port = _free_port()
        if self.fault is None or not self.fault.keeps_port:
            self._held.close()
        common = {**os.environ, **visible(gpus)}
        if self.spec.shared and self.spec.world > 1:
            self._service = MultiProcessService(self.folder / "mps")
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
                        [*self.command, str(self.folder)],
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
        for rank, status in enumerate(statuses):
            if status not in (None, 0):
                raise self._fail(self._death(rank, status))
        if all(status == 0 for status in statuses):
            self.end()
            return self._results()
        now = time.monotonic()
        events = [self._files(rank).last_event() for rank in range(self.spec.world)]
        if all(event.get("event") == "done" for event in events):
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
        event = self._files(1).last_event().get("event")
        if event == self.fault.kill_at and self.processes[1].poll() is None:
            kill(self.processes[1].pid)

    def _fail(self, reason: str) -> EngineError:
        self.end()
        return EngineError(f"{self.spec.name}: {reason}")

    def _death(self, rank: int, status: int) -> str:
        how = (
            f"was ended by {signal.Signals(-status).name}"
            if status < 0
            else f"ended with status {status}"
        )
        # A rank whose peer is gone dies of that: the first one that says why is the cause.
        said = next(
            (
                f" Rank {other} says: {text.rstrip('.')}."
                for other in (rank, *range(self.spec.world))
                if (text := error_of(self._files(other).log))
            ),
            "",
        )
        doing = self._files(rank).last_event().get("event", "before it started")
        return f"rank {rank} {how} while {doing}.{said} Its log is {self._files(rank).log}."

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
            lines += _text(files.stack).splitlines()[:40]
        return "\n".join(lines)

    def _doing(self, rank: int) -> str:
        event = self._files(rank).last_event()
        return " ".join(str(value) for value in event.values()) or "before it started"

    def _results(self) -> list[dict[str, Any]]:
        return [json.loads(self._files(rank).result.read_text()) for rank in range(self.spec.world)]

    def _files(self, rank: int) -> RankFiles:
        return RankFiles(self.folder, rank)


def error_of(log: Path) -> str:
    """The last error that a log names, empty without one."""
    errors = [line.strip() for line in _text(log).splitlines() if _ERROR.match(line.strip())]
    return errors[-1] if errors else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""


def _free_port() -> tuple[socket.socket, int]:
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    held.listen()
    return held, held.getsockname()[1]

"""A rank without vLLM: ``rehearse_stand_in.py BEHAVIOUR FOLDER PARENT``; standard library only."""

import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FOLDER = Path(sys.argv[2])
SLEEPER = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]


def event(name, **values):
    with (FOLDER / f"rank{RANK}.events").open("a") as file:
        file.write(json.dumps({"event": name, **values}) + "\n")


def finish(**more):
    result = {"rank": RANK, "local": os.environ["LOCAL_RANK"], "argv": sys.argv[3:], **more}
    (FOLDER / f"rank{RANK}.json").write_text(json.dumps(result))
    event("done")


def hang_in_a_collective():
    (FOLDER / f"rank{RANK}.last").write_text(f"{RANK + 40}: all_reduce tp:0 (3, 4)".ljust(256))
    time.sleep(600)


def note_child(child):
    (FOLDER / f"rank{RANK}.child").write_text(str(child.pid))


def main(behaviour):
    stack = (FOLDER / f"rank{RANK}.stack").open("w")
    faulthandler.register(signal.SIGUSR1, stack, all_threads=True)
    event("starting")
    if behaviour == "fine":
        event("served", done=1, of=2)
        finish()
    elif behaviour == "raises" and RANK == 1:
        print("ValueError: an old one, that was handled")
        event("served", done=1, of=2)
        raise RuntimeError("the cache is on fire")
    elif behaviour == "killed" and RANK == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    elif behaviour == "silent" and RANK == 1:
        sys.exit(0)  # nothing was answered
    elif behaviour == "hangs":
        for _ in range(12):  # helpers, as vLLM has them
            threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        hang_in_a_collective()
    elif behaviour == "serves on":
        for number in range(6000):
            event("served", done=number, of=6000)
            time.sleep(0.1)
    elif behaviour == "hangs at exit":
        finish()
        if RANK == 1:
            time.sleep(600)
    elif behaviour == "leaves a child":
        note_child(subprocess.Popen(SLEEPER))
        finish()
    elif behaviour == "has children":
        note_child(subprocess.Popen(SLEEPER, start_new_session=True))
        time.sleep(600)
    elif behaviour == "compares settings":
        # As ranks that agree before they start: each leaves what it has, and reads its peers'.
        mine = {n: v for n, v in os.environ.items() if n.startswith("VLLM_DCP") or "PLUGINS" in n}
        (FOLDER / f"rank{RANK}.mine").write_text(json.dumps(mine))
        while len(list(FOLDER.glob("*.mine"))) < WORLD or not all(
            path.read_text() for path in FOLDER.glob("*.mine")
        ):
            time.sleep(0.02)
        theirs = {r: json.loads((FOLDER / f"rank{r}.mine").read_text()) for r in range(WORLD)}
        if len({json.dumps(one, sort_keys=True) for one in theirs.values()}) > 1:
            raise RuntimeError(f"the ranks differ: {theirs}")
        finish()
    elif behaviour == "binds the port":
        import socket

        if RANK == 0:
            with socket.socket() as server:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                server.bind(("", int(os.environ["MASTER_PORT"])))
                server.listen()
        finish()
    elif behaviour == "environment":
        finish(environment=dict(os.environ))
    else:  # another rank of an engine whose rank 1 misbehaves
        time.sleep(600)


main(sys.argv[1])

"""Rounds of a soak: one run is chosen, versions are published, something dies, and the server must end with the newest.

After each round, and at random moments in it, the label is read, then every live parameter's digest, then the label
again; if the label did not move, the digests must be those of the version that it names.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.soak.counts import Counts
from tests.soak.expected import differing, live_digests
from tests.soak.processes import TrainerDied, TrainerProcess, kill_stagers
from tests.support.digests import parameters_in
from tests.support.follower import FollowerProcess
from tests.support.server import ServerProcess, greedy
from tests.support.tiny_models import make_model
from vllm_delta_snapshot.drive import ServerError

SERVED_TIMEOUT_S = 240.0
"""After what was killed has been started again."""

SAMPLER = "soak"


class WrongServer(Exception):
    """What must not be."""


class Soak:
    """Everything that lives, and the rounds.

    Args:
        folder: an empty folder for all of it.
        seed: what decides what happens, as far as processes let it.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._rng, self.counts = folder, random.Random(seed), Counts(seed)
        self._base, self._stage = folder / "base", folder / "stage"
        make_model("qwen3", self._base)
        self._trainers = {name: self._trainer(name) for name in ("A", "B")}
        self._follower: FollowerProcess | None = None
        self._followers = 0
        self._run = ""
        self._server = self._new_server()
        self._expected: dict[tuple[str, int], dict[str, str]] = {}
        self._stop = threading.Event()
        self._troubles: dict[str, Callable[[TrainerProcess, int], None]] = {
            "none": self._calm,
            "trainer killed": self._kill_trainer,
            "trainer interrupted": self._interrupt_trainer,
            "stager killed": self._kill_stager,
            "follower killed": self._kill_follower,
            "follower and stager killed": self._kill_both,
            "server killed": self._kill_server,
        }

    def _trainer(self, name: str) -> TrainerProcess:
        states = self._folder / f"states-{name}"
        return TrainerProcess(self._base, self._folder / f"run-{name}", states, self._folder / f"trainer-{name}.log")

    def _new_server(self) -> ServerProcess:
        return ServerProcess(self._base, self._folder / "server.log", DELTA_SNAPSHOT_STAGE_DIR=str(self._stage))

    def last(self, minutes: float) -> None:
        """Go on for so long; what must not be is counted, and ends it."""
        started = time.monotonic()
        load = threading.Thread(target=self._load, name="load")
        try:
            for trainer in self._trainers.values():
                trainer.ensure(self._rng.getrandbits(32))
            self._server.start()
            self._server.wait_ready()
            load.start()
            while time.monotonic() < started + 60 * minutes:
                self._round()
            self._control()
            for trainer in self._trainers.values():
                trainer.close()
                self._verify_run(trainer)
        except (WrongServer, TrainerDied, ServerError, subprocess.SubprocessError, AssertionError) as error:
            self.counts.faults.append(f"{type(error).__name__}: {error}")
        finally:
            self.counts.seconds = time.monotonic() - started
            self._end(load)

    def _end(self, load: threading.Thread) -> None:
        self._stop.set()
        if self._follower is not None:
            self._follower.kill()
        for trainer in self._trainers.values():
            if trainer.starts:
                trainer.signal(signal.SIGKILL, is_all=True)
        with contextlib.suppress(ProcessLookupError):
            self._server.kill()
        kill_stagers(self._stage)
        if load.is_alive():
            load.join()

    def _round(self) -> None:
        name = self._rng.choice("AB") if self._rng.random() < 0.4 or not self._run else self._run
        trainer = self._trainers[name]
        trainer.ensure(self._rng.getrandbits(32))
        self._follow(name)
        trouble = "none" if self._rng.random() < 0.4 else self._rng.choice(sorted(self._troubles))
        self._say(f"run {name}, version {trainer.version}, trouble: {trouble}")
        before = trainer.version
        self._troubles[trouble](trainer, self._rng.choice([1, 1, 2, 4]))
        trainer.ensure(self._rng.getrandbits(32))
        self._follow(name)
        self.counts.troubles[trouble] += 1
        self.counts.versions[name] += trainer.version - before
        self._wait_served(name, trouble)
        if self._rng.random() < 0.15:
            self._verify_server()

    # What goes wrong.

    def _calm(self, trainer: TrainerProcess, count: int) -> None:
        trainer.ask(count)
        while self._rng.random() < 0.7:
            self._look()
        self._take(trainer)

    def _kill_trainer(self, trainer: TrainerProcess, count: int) -> None:
        self._meanwhile(trainer, count, lambda: trainer.signal(signal.SIGKILL, is_all=self._rng.random() < 0.5))

    def _interrupt_trainer(self, trainer: TrainerProcess, count: int) -> None:
        self._meanwhile(trainer, count, lambda: trainer.signal(signal.SIGINT))

    def _kill_stager(self, trainer: TrainerProcess, count: int) -> None:
        self._meanwhile(trainer, count, lambda: kill_stagers(self._stage))

    def _kill_follower(self, trainer: TrainerProcess, count: int) -> None:
        self._meanwhile(trainer, count, self._end_follower)

    def _end_follower(self) -> None:
        if self._follower is not None:
            self._follower.kill()
            self._follower.wait()  # who asks whether it lives must not find it dying

    def _kill_both(self, trainer: TrainerProcess, count: int) -> None:
        self._kill_follower(trainer, count)
        kill_stagers(self._stage)

    def _kill_server(self, trainer: TrainerProcess, count: int) -> None:
        self._meanwhile(trainer, count, self._server.kill)
        self._server.start()
        self._server.wait_ready()

    def _meanwhile(self, trainer: TrainerProcess, count: int, act: Callable[[], object]) -> None:
        """Have versions published, and act at a random moment of it, or of what follows from it."""
        trainer.ask(count)
        moment = threading.Timer(self._rng.uniform(0.0, 2.0), act)
        moment.start()
        try:
            self._take(trainer)
        finally:
            moment.join()

    def _take(self, trainer: TrainerProcess) -> None:
        with contextlib.suppress(TrainerDied):  # it is started again, and says then where it is
            self.counts.odd_writes.update(trainer.answer()["ways"])

    # What must be.

    def _follow(self, name: str) -> None:
        """Have a living follower at a run."""
        if self._run == name and self._follower is not None and self._follower.is_alive:
            return
        if self._follower is not None:
            if self._rng.random() < 0.5:
                self._follower.kill()
            else:
                self._follower.terminate()
            self._follower.wait()
        self.counts.switches += self._run not in ("", name)
        self._run = name
        self._followers += 1
        log = self._folder / f"follower-{self._followers}.log"
        run = self._trainers[name].sync_dir
        options = ("--sampler", SAMPLER, "--switch-run")
        self._follower = FollowerProcess(run, self._server.client.url, log, *options)
        self._follower.wait_listening()

    def _wait_served(self, name: str, trouble: str) -> None:
        trainer = self._trainers[name]
        label = f"{trainer.run_id}@{trainer.version}"
        started = time.monotonic()
        while not self._look(label):
            if time.monotonic() > started + SERVED_TIMEOUT_S:
                raise WrongServer(f"after {trouble!r} the server did not come to {label} in {SERVED_TIMEOUT_S:.0f} s")
            time.sleep(0.05)  # polling
        self.counts.waited(time.monotonic() - started, trouble)
        self.counts.updates += 1

    def _look(self, wanted: str | None = None) -> bool:
        """Compare label and weights; say whether the label is the one wanted."""
        client = self._server.client
        try:
            label = client.weight_version()
            live = parameters_in(client.checksums())
            is_same = client.weight_version() == label
        except ServerError:
            return False  # it was killed, or a follower's call ends in an error of its own; who waits has a deadline
        if not is_same or "@" not in label:
            return False
        self.counts.looks += 1
        self._compare(label, live)
        return label == wanted

    def _compare(self, label: str, live: dict[str, str]) -> None:
        run_id, _, version = label.rpartition("@")
        wrong = differing(self._digests(run_id, int(version)), live)
        self.counts.tensors += len(live)
        # Between the write and the label, in one pause, the weights are those of a version that is not named yet.
        if wrong and not self._is_newer_state(live) and self._server.client.weight_version() == label:
            raise WrongServer(f"labelled {label}, wrong in {len(wrong)} parameters, the first {wrong[0]}")

    def _digests(self, run_id: str, version: int) -> dict[str, str]:
        (name,) = (name for name, trainer in self._trainers.items() if trainer.run_id == run_id)
        state = self._trainers[name].states / f"{version:08d}.safetensors"
        if version == 0:
            state = self._base / "model.safetensors"
        return live_digests(state)

    def _is_newer_state(self, live: dict[str, str]) -> bool:
        trainer = self._trainers[self._run]
        states = sorted(trainer.states.glob("0*.safetensors"))[-6:]
        return self._server.client.is_paused() and any(not differing(live_digests(state), live) for state in states)

    def _verify_server(self) -> None:
        self._command("verify", "--server", self._server.client.url)
        self.counts.verified["verify --server"] += 1

    def _verify_run(self, trainer: TrainerProcess) -> None:
        """Prove the run from its files, and make a checkpoint of its newest version."""
        if not trainer.version:
            return
        self._command("verify", str(trainer.sync_dir), "--deep", "--base", str(self._base))
        self.counts.verified["verify --deep"] += 1
        out = self._folder / f"materialized-{trainer.run_id}"
        self._command("materialize", str(trainer.sync_dir), str(out), "--base", str(self._base))
        state = trainer.states / f"{trainer.version:08d}.safetensors"
        wrong = differing(live_digests(state), live_digests(out / "model.safetensors"))
        shutil.rmtree(out)
        self.counts.verified["materialize"] += 1
        if wrong:
            raise WrongServer(f"materialized {trainer.run_id}@{trainer.version} is wrong in {wrong[0]}")

    def _control(self) -> None:
        """Change weights behind everybody's back: what compares them must see it, and the next update mend it."""
        self._server.client.drift()
        with contextlib.suppress(WrongServer):
            self._look()
            raise AssertionError("weights were changed and the comparison did not see it")
        self.counts.controls += 1
        trainer = self._trainers[self._run]
        drifted = self._server.client.weight_version()
        trainer.ask(1)
        trainer.answer()
        self.counts.versions[self._run] += 1
        deadline = time.monotonic() + SERVED_TIMEOUT_S
        while self._server.client.weight_version() == drifted and time.monotonic() < deadline:
            time.sleep(0.05)  # polling: until the repair, the weights are those of no version, as was wanted
        self._wait_served(self._run, "weights changed by something else")

    def _command(self, *words: str) -> None:
        done = subprocess.run(
            [sys.executable, "-c", "from vllm_delta_snapshot.cli import main; main()", *words],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if done.returncode:
            raise WrongServer(f"{' '.join(words)} ended with {done.returncode}: {done.stderr.strip()[-500:]}")

    def _load(self) -> None:
        """Ask for tokens, one request after the other, until told to stop."""
        prompts = self._prompts()
        while not self._stop.is_set():
            try:
                greedy(self._server.client, next(prompts), 32)
                self.counts.requests += 1
            except (ServerError, KeyError):
                self._stop.wait(0.5)  # the server is dead: it is started again

    def _prompts(self) -> Iterator[list[int]]:
        rng = random.Random(0)
        shared = [rng.randrange(3, 500) for _ in range(48)]
        while True:
            yield [*shared[: rng.randrange(16, 48)], *(rng.randrange(3, 500) for _ in range(8))]

    def _say(self, what: str) -> None:
        sys.stderr.write(f"updates={self.counts.updates} {what}\n")

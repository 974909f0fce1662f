"""A client process that trains as the simulator's clients do: the same client_training, the same share of the data.

    python tests/net/sim_client.py

Every line on stdin is an `Errand` as JSON: take part in one federation until it has ended. When it has, a line on
stdout says how many updates were taken.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from aflock import rng
from aflock.local import Memory
from aflock.net.client.session import Pulled, Session
from aflock.net.protocol.refusals import Refused
from aflock.sim.client_training import ClientTraining
from aflock.sim.experiment import Experiment
from aflock.sim.parts import assemble
from aflock.system.threads import one_thread

ENDED = 410
LONGEST_WORK = 0.03
"""Seconds a job takes at most: what makes the clients overtake each other."""


@dataclass(frozen=True)
class Errand:
    """One federation to take part in."""

    url: str
    token: str
    experiment: dict[str, Any]
    loses: bool = False
    """Whether the client loses its first job, and every fifth: it pulls again without having answered."""
    jobs: int | None = None
    """After so many it leaves the federation for good, and comes back as `heir`."""
    heir: str = ""
    """The token of another client."""

    def text(self) -> str:
        """As it is handed to the process."""
        return json.dumps(asdict(self)) + "\n"


async def run(errand: Errand) -> int:
    """Takes part; how many updates were taken."""
    client_training = assemble(Experiment.build(errand.experiment)).client_training
    done = await _work(errand, client_training)
    if done == errand.jobs:
        done += await _work(replace(errand, token=errand.heir, jobs=None), client_training)
    return done


async def _work(errand: Errand, client_training: ClientTraining) -> int:
    """One client, until the federation ends or it has had enough."""
    memory, done = dict[str, Any](), 0
    async with Session(errand.url, errand.token, give_up=60.0) as session:
        await session.hello()
        try:
            pulled: Pulled | None = None
            while done != errand.jobs:
                pulled = pulled or await session.pull(wait=10)
                if pulled is None or (errand.loses and pulled.number % 5 == 0):
                    pulled = None
                    continue
                pulled = await _answered(session, client_training, memory, pulled)
                done += 1
            await session.leave()
        except Refused as refusal:
            if refusal.status != ENDED:
                raise
    return done


async def _answered(session: Session, client_training: ClientTraining, memory: Memory, pulled: Pulled) -> Pulled | None:
    """Trains and pushes as the simulator's engine does; the next job."""
    client, number = pulled.job.client, pulled.number
    trained = client_training.train(pulled.job, number, client_training.steps_of(client, number), memory, pulled.delay)
    time.sleep(LONGEST_WORK * rng.fraction(rng.counter_key(0, "work"), client, number))
    update = pulled.pack(trained.vectors, trained.steps, client_training.examples(client))
    answer = await session.push(update, next=number % 2 == 0)
    trained.keep(memory, answer.receipt)
    return answer.next


def main() -> None:
    """Runs errands until stdin ends."""
    with one_thread():
        for line in sys.stdin:
            done = asyncio.run(run(Errand(**json.loads(line))))
            sys.stdout.write(f"{done}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    os.nice(5)
    main()

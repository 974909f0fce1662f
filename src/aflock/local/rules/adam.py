"""Adam and AdamW at the client, with the delay-aware step and early stopping of the AFL paper.

    gamma = gamma_0 / (sqrt(e+1) * (1 + alpha*tau))                   at epoch e, for a client that saw the delay tau:
                                                                      versions, or the time its last job took
    gamma <- gamma * (1 + cos(pi*j/J))/2                              cosine annealing over J server rounds, if given
    m <- b1*m + (1-b1)*grad;   v <- b2*v + (1-b2)*grad^2
    x_{k+1} = x_k - gamma * (m/(1-b1^(k+1))) / (sqrt(v/(1-b2^(k+1))) + eps)

    adam     weight decay is added to the gradient
    adamw    weight decay moves x directly:   x <- x - gamma*weight_decay*x

Early stopping: after every epoch the client asks its own validation loss; when it has not improved for `patience`
epochs the job ends and x is the best epoch's. The moments start at zero in every job.

Kingma, D. P., Ba, J.: Adam: A Method for Stochastic Optimization. ICLR 2015.
Loshchilov, I., Hutter, F.: Decoupled Weight Decay Regularization. ICLR 2019.
Forootani, A., Iervolino, R.: Asynchronous Federated Learning: A Scalable Approach for Decentralized Machine Learning.
arXiv:2412.17723, 2024. Section 6.3, equation 33.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ... import kernels
from ...params import Params, choice, non_negative, positive, switch, unit, whole
from ...types import Job, Vector
from ..base import Direction, Known, LocalRule, Task, Walk, sound, start
from ..registry import register


@dataclass(frozen=True)
class AdamParams(Params):
    """Hyper-parameters of adam and adamw."""

    gamma_0: float = positive(0.001, "step size before its decay")
    alpha: float = non_negative(0.0, "how much a delay shrinks the step")
    delay: str = choice("versions", ("versions", "time"), "what the delay counts: server versions, or time")
    beta1: float = unit(0.9, "b1, decay of the first moment", zero=True)
    beta2: float = unit(0.999, "b2, decay of the second moment", zero=True)
    eps: float = positive(1e-8, "eps, keeps the division finite")
    weight_decay: float = non_negative(0.0, "pull towards zero")
    decay_epochs: bool = switch(True, "whether the step decays with 1/sqrt(e+1) over the epochs of a job")
    patience: int | None = whole(None, "epochs without improvement that end a job; None: never")
    rounds: int | None = whole(None, "J, server rounds of the cosine annealing; None: none")


class _Adam(LocalRule):
    """What adam and adamw share; they differ in where weight decay enters."""

    p: AdamParams
    decoupled: bool

    @property
    def eta_l(self) -> float:
        return self.p.gamma_0

    @property
    def delay_unit(self) -> str:
        return self.p.delay

    def rate(self, epoch: int, delay: float, version: int) -> float:
        """gamma at an epoch, for a delay, in a server round."""
        rate = self.p.gamma_0 / (1.0 + self.p.alpha * delay)
        if self.p.decay_epochs:
            rate /= math.sqrt(epoch + 1.0)
        if self.p.rounds is not None:
            rate *= (1.0 + math.cos(math.pi * min(version, self.p.rounds) / self.p.rounds)) / 2.0
        return rate

    def _run(self, job: Job, task: Task, steps: int, memory: Known, delay: float, mean: bool) -> Walk:
        x, total = start(job, task), np.zeros(job.model.size) if mean else None
        direction = self._directions(job, memory)
        best, best_loss, waited = x, math.inf, 0
        length = best_length = 0.0
        watch = task.validation if self.p.patience is not None else None
        for k in range(steps):
            gradient = sound(task.gradient(x, k), x)
            if total is not None:
                kernels.add(total, 1.0, gradient)
            rate = self.rate(k // task.batches, delay, job.version)
            if self.decoupled:
                x *= np.float32(1.0 - rate * self.p.weight_decay)
            x -= np.float32(rate) * direction(gradient, x, k)
            length += rate
            if watch is None or (k + 1) % task.batches:
                continue
            loss = watch(x)
            if loss < best_loss:
                best, best_loss, best_length, waited = x.copy(), loss, length, 0
            else:
                waited += 1
            if waited >= (self.p.patience or 0):
                return (best, total, k + 1, best_length) if best_length else (x, total, k + 1, length)
        return (x, total, steps, length) if not best_length else (best, total, steps, best_length)

    def _directions(self, job: Job, memory: Known) -> Direction:
        p = self.p
        first, second = np.zeros(job.model.size, np.float32), np.zeros(job.model.size, np.float32)

        def direction(gradient: Vector, x: Vector, k: int) -> Vector:
            if p.weight_decay and not self.decoupled:
                gradient = gradient + np.float32(p.weight_decay) * x
            first[:] = np.float32(p.beta1) * first + np.float32(1.0 - p.beta1) * gradient
            second[:] = np.float32(p.beta2) * second + np.float32(1.0 - p.beta2) * np.square(gradient)
            mean = first / np.float32(1.0 - p.beta1 ** (k + 1))
            spread = np.sqrt(second / np.float32(1.0 - p.beta2 ** (k + 1))) + np.float32(p.eps)
            moved: Vector = mean / spread
            return moved

        return direction


@register(
    "adam",
    paper="Kingma and Ba, ICLR 2015; delay-aware step: the AFL paper",
    rule="m/(sqrt(v)+eps), step gamma_0/(sqrt(e+1)*(1+alpha*tau)) at epoch e",
    params=AdamParams,
)
class Adam(_Adam):
    """Adam; weight decay is part of the gradient."""

    decoupled = False


@register(
    "adamw",
    paper="Loshchilov and Hutter, ICLR 2019; delay-aware step: the AFL paper",
    rule="as adam, with weight decay applied to x directly",
    params=AdamParams,
)
class AdamW(_Adam):
    """Adam with decoupled weight decay."""

    decoupled = True

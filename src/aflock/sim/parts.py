"""Builds the parts of an experiment: every process that builds them from the same file gets the same parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .. import data, local, models, strategies
from ..data import Dataset, Partition, partition
from ..errors import ParameterError
from ..models.base import Model
from ..strategies.base import Strategy
from ..training import check_rate
from . import delays
from .client_training import ClientTraining
from .experiment import Experiment, Named
from .fleet import Fleet


@dataclass(frozen=True)
class Parts:
    """Data, clients, rule and model of one experiment."""

    dataset: Dataset
    partition: Partition
    fleet: Fleet
    strategy: Strategy
    model: Model
    client_training: ClientTraining


def assemble(experiment: Experiment, loaded: tuple[Dataset, Partition] | None = None) -> Parts:
    """Builds all parts; everything random in them depends on the experiment's seeds alone.

    `loaded`: what `split` returned for the same experiment, maybe on another machine.
    """
    section, seeds = experiment.section, experiment.section("seeds")
    dataset, shares = loaded or split(experiment)
    fleet = _fleet(experiment, dataset, shares)
    rule: Named = section("strategy")
    strategy = strategies.create(rule.name, len(fleet.initial()), seed=seeds.training, **rule.params)
    model = models.create(section("model").name, dataset, **section("model").params)
    training = _client_training(experiment, dataset, shares, strategy, model)
    return Parts(dataset, shares, fleet, strategy, model, training)


def split(experiment: Experiment) -> tuple[Dataset, Partition]:
    """Loads the data and splits them over the clients."""
    source, how, seed = experiment.section("data"), experiment.section("partition"), experiment.section("seeds").data
    dataset = data.load(source.name, seed=seed, **source.params)
    return dataset, partition.create(how.name, dataset, experiment.clients, seed=seed, **how.params)


def _fleet(experiment: Experiment, dataset: Dataset, shares: Partition) -> Fleet:
    params, labels = experiment.section("fleet"), dataset.train_y
    delay: Named = experiment.section("delays")
    rankings: dict[str, Callable[[], list[float] | None]] = {
        "none": lambda: None,
        "class": lambda: [float(labels[rows].mean()) for rows in shares.indices],
        "size": lambda: [float(len(rows)) for rows in shares.indices],
    }
    made = delays.create(delay.name, **delay.params)
    seed = experiment.section("seeds").schedule
    return Fleet(len(shares.indices), made, params, seed=seed, ranking=rankings[params.correlate]())


def _client_training(
    experiment: Experiment, dataset: Dataset, shares: Partition, strategy: Strategy, model: Model
) -> ClientTraining:
    training = experiment.section("training")
    kinds: dict[str, Callable[[int], local.Steps]] = {
        "fixed": local.Fixed,
        "dynamic": local.Dynamic,
        "epochs": local.Epochs,
    }
    half: Named = experiment.section("local")
    rule = local.made(half.name, half.params, strategy.client_half)
    local.check_halves(rule, strategy.name, strategy.needs, strategy.client_half)
    _check_rate(model, rule)
    return ClientTraining(
        dataset,
        shares,
        model,
        rule,
        kinds[training.kind](training.steps),
        training.batch,
        experiment.section("seeds").training,
        strategy.needs,
        strategy.changes,
        training.validation,
    )


def _check_rate(model: Model, rule: local.LocalRule) -> None:
    rate = check_rate(model, rule)
    if rate is not None:
        raise ParameterError(
            f"[model] rate = {rate} with buffers 'average' needs [local] name = 'sgd' with eta_l = {rate} and nothing "
            f"added; it has {rule.name} with eta_l = {rule.eta_l:g}"
        )

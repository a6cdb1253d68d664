"""Which layout of N ranks has the shortest step, by measured times of its phases.

A phase is taken to last as a straight line says, over what one engine or one data-parallel trainer rank has to do:

    generate = g0 + g1 * completions of a step / engines
    train    = t0 + t1 * completions of a step / data-parallel trainer ranks     (with the reference, if there is one)

and a step `generate + train + sync`, or `max(generate, train) + sync` with overlap_steps=1, which only split layouts
can have. Samples that are a step old must be worth it: such a layout is chosen only if it saves LEAST_GAIN of the step.
Left out: what sharding over more or fewer ranks costs, ranks for the reference alone, a KV cache of another size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from grpo.config.checks import validate
from grpo.config.fields import SHARED_GPU, GeneratorConfig, GRPOConfig
from grpo.config.layout import describe_layout

# Share of the step's time that a layout with older samples must save
LEAST_GAIN = 0.05


@dataclass(frozen=True)
class Line:
    """Seconds of a phase over the completions that one rank, or engine, has in a step."""

    fixed: float
    per_completion: float

    @classmethod
    def through(cls, first: tuple[float, float], second: tuple[float, float]) -> "Line":
        """Through two measured (completions, seconds), the second of more completions; neither part is below 0."""
        (less, short), (more, long) = first, second
        per_completion = max(long - short, 0.0) / (more - less)
        fixed = long - per_completion * more
        return cls(fixed, per_completion) if fixed >= 0 else cls(0.0, long / more)

    def at(self, completions: float) -> float:
        return self.fixed + self.per_completion * completions


@dataclass(frozen=True)
class PhaseTimes:
    """What was measured."""

    generate: Line
    """Over the completions of an engine."""
    train: Line
    """Over the completions of a data-parallel rank."""
    sync: float
    """Seconds."""


@dataclass(frozen=True)
class Prediction:
    """A layout and the seconds that its phases should take."""

    config: GRPOConfig
    generate: float
    train: float
    sync: float

    @property
    def step(self) -> float:
        both = max(self.generate, self.train) if self.config.overlap_steps else self.generate + self.train
        return both + self.sync

    @property
    def arithmetic(self) -> str:
        """Where the seconds of the step come from."""
        generate, train = f"{self.generate:.2f}", f"{self.train:.2f}"
        both = f"max({generate}, {train})" if self.config.overlap_steps else f"{generate} + {train}"
        return f"{both} + {self.sync:.2f} = {self.step:.2f} s"


def colocated(config: GRPOConfig, num_ranks: int) -> GRPOConfig:
    """The config with every role on each of `num_ranks` ranks; the engine takes a part of the memory."""
    memory = min(config.generator.gpu_memory_utilization, SHARED_GPU)
    return replace(
        config,
        roles=replace(config.roles, colocated=True, num_trainers=num_ranks, num_references=0),
        generator=replace(config.generator, gpu_memory_utilization=memory),
        overlap_steps=0,
    )


def split(config: GRPOConfig, num_trainers: int, num_generators: int) -> GRPOConfig:
    """The config with so many ranks of each role; trainers hold the reference, if there is one."""
    layout = {"num_trainers": num_trainers, "num_references": 0, "num_generators": num_generators}
    memory = config.generator.gpu_memory_utilization
    if config.roles.colocated:  # then what the config has is a share
        memory = max(memory, GeneratorConfig.gpu_memory_utilization)
    return replace(
        config,
        roles=replace(config.roles, colocated=False, **layout),
        generator=replace(config.generator, gpu_memory_utilization=memory, sleep=False),
    )


def possible_layouts(config: GRPOConfig, num_ranks: int) -> list[GRPOConfig]:
    """The colocated layout and all split ones of `num_ranks` ranks that the config's own checks let pass."""
    tensor_parallel = config.generator.tensor_parallel
    candidates = [colocated(config, num_ranks)]
    candidates += [split(config, num_ranks - k, k) for k in range(tensor_parallel, num_ranks, tensor_parallel)]
    return [candidate for candidate in candidates if _is_valid(candidate)]


def predict(config: GRPOConfig, times: PhaseTimes) -> Prediction:
    """The seconds of this config's phases, by its numbers of engines and data-parallel ranks."""
    roles, completions = config.roles, config.completions_per_step
    num_generators = roles.num_trainers if roles.colocated else roles.num_generators
    num_engines = num_generators // config.generator.tensor_parallel
    num_data_ranks = roles.num_trainers // config.trainer.tensor_parallel
    generate, train = times.generate.at(completions / num_engines), times.train.at(completions / num_data_ranks)
    return Prediction(config, generate, train, times.sync)


def choose(predictions: Sequence[Prediction]) -> Prediction:
    """The shortest step; of several that are equal, the first. Without overlap if that costs less than LEAST_GAIN."""
    fastest = min(predictions, key=lambda prediction: prediction.step)
    in_turns = [prediction for prediction in predictions if not prediction.config.overlap_steps]
    on_policy = min(in_turns, key=lambda prediction: prediction.step, default=fastest)
    return on_policy if on_policy.step * (1 - LEAST_GAIN) <= fastest.step else fastest


def layout_changes(config: GRPOConfig) -> dict[str, bool | int | float | str]:
    """The fields that make another config of the same run have this layout, for `recipes.change`."""
    roles, generator = config.roles, config.generator
    return {
        "roles.layout": "given",
        "roles.colocated": roles.colocated,
        "roles.num_trainers": roles.num_trainers,
        "roles.num_references": roles.num_references,
        "roles.num_generators": roles.num_generators,
        "generator.gpu_memory_utilization": generator.gpu_memory_utilization,
        "generator.sleep": generator.sleep,
        "overlap_steps": config.overlap_steps,
    }


def layout_flags(config: GRPOConfig) -> str:
    """The command-line flags of its layout."""
    roles = config.roles
    flags = f"--roles.num-trainers {roles.num_trainers} --roles.num-references 0"
    if roles.colocated:
        flags = (
            f"--roles.colocated {flags} --generator.gpu-memory-utilization {config.generator.gpu_memory_utilization}"
        )
    else:
        flags = f"--roles.no-colocated {flags} --roles.num-generators {roles.num_generators}"
    return f"{flags} --overlap-steps {config.overlap_steps}"


def table(predictions: Sequence[Prediction], chosen: Prediction) -> str:
    """A line for each layout, the chosen one marked."""
    names = [describe_layout(p.config) + (", overlap" if p.config.overlap_steps else "") for p in predictions]
    width = max(map(len, names))
    return "\n".join(
        f"{'->' if prediction is chosen else '  '} {name:{width}}  {prediction.arithmetic}"
        for name, prediction in zip(names, predictions, strict=True)
    )


def _is_valid(config: GRPOConfig) -> bool:
    try:
        validate(config)
    except ValueError:
        return False
    return True

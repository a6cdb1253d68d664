"""The generator: one vLLM engine per replica, inside its torchrun ranks.

Token ids go in, token ids and log-probs come out. Text, chat templates and rewards are the driver's. vllm_engine.py
starts engines, and loop.py steps them, with the shortcuts of shortcuts.py and launches.py; only these import vllm.
"""

import collections
import gc
import itertools
import random
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from grpo.config import DataConfig, GeneratorConfig, ModelConfig
from grpo.config.engine_options import truncates
from grpo.metrics import set_given_back
from grpo.models.families import has_experts
from grpo.models.hf_folder import read_hf_config
from grpo.roles.engine import vllm_engine
from grpo.roles.engine.launches import GraphedSteps
from grpo.roles.engine.loop import EngineLoop, no_collection
from grpo.roles.engine.shortcuts import model_runner_of, sampler_of
from grpo.roles.process_groups import Roles
from grpo.types import Piece, Request, Requests, Rollout

# Each run's request seeds lie in a block of its own, which is larger than any number of samples that a run can draw
SEEDS_PER_RUN = 2**40
# Completions that were begun in an earlier step have seeds from here on, above the blocks of all runs
CONTINUATIONS = 2**62


class Generator:
    """One replica's engine on this rank, with the version of the weights it holds.

    All ranks of a replica make the same calls with the same arguments; vLLM keeps them in lock step.
    """

    def __init__(
        self,
        config: GeneratorConfig,
        model: ModelConfig,
        data: DataConfig,
        seed: int,
        folder: str,
        stop_token_ids: Sequence[int],
        roles: Roles,
        episodes: Any = None,
    ):
        """Start the engine (seconds on CPU, 20-95 s on GPU). Collective over the replica, colocated over all ranks.

        episodes: environments that make conversations of completions (features/environments/episodes.py).
        """
        self.config = config
        self.seed = seed
        self.roles = roles
        self.episodes = episodes
        self.version = 0
        self.asleep = False
        vllm_engine.import_vllm(roles)
        sampling = vllm_engine.in_vllms_types(config.sampling)
        self._parameters = partial(
            vllm_engine.sampling_params,
            config,
            list(stop_token_ids),
            sampling,
        )
        self.min_tokens = sampling.get("min_tokens", 0)
        hf = read_hf_config(folder)
        self.has_experts = has_experts(hf)
        self.ties_head = bool(hf.tie_word_embeddings)
        options = vllm_engine.options_of_model(
            hf,
            config.engine,
            roles.device,
            config.tensor_parallel,
        )
        self.llm = vllm_engine.start_engine(
            config,
            model,
            data,
            seed,
            folder,
            roles,
            options,
        )
        self.loop = EngineLoop(self.llm, vllm_engine.needs_texts(config))
        if truncates(config.sampling):
            self.loop.sampled_tokens.sampler = sampler_of(self.llm)
        runner = model_runner_of(self.llm)
        plain = self.loop.sampled_tokens.plain
        if plain and GraphedSteps.fit(runner):
            GraphedSteps(runner, plain)

    def generate(
        self,
        requests: Requests,
        *,
        temperatures: Sequence[float] | None = None,
        held_out: bool = False,
        max_tokens: int | None = None,
    ) -> list[Rollout] | None:
        """Sample this replica's part of the requests, until enough groups are complete.

        A completion that was begun before goes on, and only its tokens of this call are returned. `temperatures`
        (default: the run's) take turns within a group; 0 is greedy. `held_out` takes seeds that training never uses.
        `max_tokens` ends completions earlier than the run does, but not before its `min_tokens`, and plays no episodes.

        Returns rollouts on the replica's first rank, in the order of their `index`, and None on its other ranks. An
        exception in here is fatal for the rank: vLLM keeps unfinished requests queued.
        """
        if self.asleep:
            raise RuntimeError("the engine sleeps without weights; they come back with the next sync_weights")
        temperatures = temperatures or self.config.temperature
        limit = self.config.max_completion_tokens
        if max_tokens is not None:
            limit = min(limit, max(max_tokens, self.min_tokens))
        replicas = self.roles.replicas
        replica = replicas.index(self.roles.replica)
        shares = share_out(requests, len(replicas))
        enough = enough_groups(shares, requests.num_left)[replica]
        mine = shares[replica] if enough else []

        def temperature_of(request: Request) -> float:
            return temperatures[request.index % requests.group_size % len(temperatures)]

        def add(
            number: int,
            ids: list[int],
            num_tokens: int,
            max_tokens: int,
            name: Hashable = None,
        ) -> None:
            """Sample after `ids`, whose last `num_tokens` follow the prompt.

            name: of the loop's request, if a rollout has several at once; then `num_tokens` is any number of its own.
            """
            request = mine[number]
            seed = continuation_seed(request_seed(self.seed, request.index, held_out), num_tokens)
            parameters = self._parameters(temperature_of(request), seed, max_tokens)
            self.loop.add(number if name is None else name, ids, parameters)

        rollouts = []
        self.loop.version = self.version
        if truncates(self.config.sampling):
            self.loop.sampled_tokens.keep_ids(not held_out)
        with no_collection():
            if self.episodes and max_tokens is None:
                numbered = [(request.prompt, request.index % requests.group_size) for request in mine]
                played = self.episodes.complete(
                    self.loop, numbered, limit, add, run_seed=self.seed, version=self.version, held_out=held_out
                )
                for rollout, request in zip(played, mine, strict=False):  # none except on the head
                    rollouts.append(replace(rollout, index=request.index, temperature=temperature_of(request)))
            else:
                for number, request in enumerate(mine):
                    num_begun = len(request.begun)
                    add(
                        number,
                        request.prompt.ids + request.begun,
                        num_begun,
                        limit - num_begun,
                    )
                for number, piece in self._decode(mine, enough).items():
                    request = mine[number]
                    rollout = Rollout(
                        request.prompt,
                        request.index,
                        sequences=((Piece.written(request.prompt.ids), piece),),
                        temperature=temperature_of(request),
                        ended_by=piece.ended_by,
                    )
                    rollouts.append(rollout)
        if self.roles.rank not in self.roles.heads:
            return None
        return sorted(rollouts, key=lambda rollout: rollout.index)

    def _decode(self, requests: list[Request], enough: int) -> dict[int, Piece]:
        """Run the engine until the requests of `enough` groups have ended; then end the remaining ones."""
        num_left = collections.Counter(request.prompt.index for request in requests)
        pieces = {}
        while self.loop.num_running:
            ended = self.loop.step()
            pieces |= ended
            num_left.subtract(requests[number].prompt.index for number in ended)
            if sum(not left for left in num_left.values()) >= enough:
                return pieces | self.loop.end()
        return pieces

    def load_weights(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Load new weights and clear the prefix cache.

        `tensors` yields every (name, full tensor) of the policy. Each owns its memory, because vLLM may keep it
        until its layer is complete. Collective over the replica and as `tensors` is: each rank consumes all of it.
        """
        self._wake("weights")
        quantized = any(self.config.engine.get(name) for name in ("quantization", "quantization_config"))
        # kernels read repacked (on a CPU) or quantized copies, and only a full reload makes them again
        if self.roles.device.type == "cpu" or quantized:
            # vLLM's own config says that the two are not tied where a folder has a copy of the head, as Qwen3-0.6B's
            if self.ties_head:
                tensors = _with_tied_head(tensors)
            if self.has_experts:
                for runner in vllm_engine.expert_layers(self.llm):
                    runner._quant_method.moe_kernel = None  # else it keeps the experts that it packed at its start
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})
        else:  # into the live parameters, in place, so that captured CUDA graphs stay valid
            model_runner_of(self.llm).get_model().load_weights(tensors)
        if self.roles.device.type == "cuda":
            torch.cuda.synchronize()  # so that the time is a sync's own
        self._wake("kv_cache")
        self.asleep = False
        self.forget_prefixes()
        self.version = version

    def forget_prefixes(self) -> None:
        """Clear the prefix cache, so that the next prompts are computed as if nothing had been sampled before."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache, so it would sample from stale keys and values")

    def sleep(self) -> None:
        """Give the memory of weights and KV cache back until the next `load_weights`, if `generator.sleep` is set."""
        if self.config.sleep and self.roles.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info()
            self.llm.sleep(level=2)  # keeps no copy of the weights on the host; the next sync brings new ones
            set_given_back(torch.cuda.mem_get_info()[0] - free)
            self.asleep = True

    def _wake(self, tag: str) -> None:
        if self.asleep:
            torch.cuda.empty_cache()  # the trainer's cached blocks would take the room
            set_given_back(0)
            self.llm.wake_up(tags=[tag])

    def close(self) -> None:
        """Shut down the environments, the engine and the default process group; nothing may communicate after it.

        On a CPU the engine itself ends with the process, because its shutdown takes seconds.
        """
        if self.episodes:
            self.episodes.close()
        if self.roles.device.type != "cpu":
            self.llm.llm_engine.model_executor.shutdown()
            del self.llm, self.loop
            gc.collect()
        vllm_engine.destroy_groups()


def _with_tied_head(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the embedding's tensor a second time as the LM head, which shares it: a full reload needs both names."""
    for name, tensor in tensors:
        yield name, tensor
        if name == "model.embed_tokens.weight":
            yield "lm_head.weight", tensor


# ---- What each replica samples, in which order and with which seeds. Only counts decide, so all ranks agree ----------


def share_out(requests: Requests, num_replicas: int) -> list[list[Request]]:
    """Return each replica's part of a step's completions, in the order in which it begins them.

    Replicas get nearly equal numbers of neighbouring completions, because a group shares the computation of its prompt.
    If groups may stay unfinished, replicas get whole groups in turns.
    """
    everything = requests.requests
    if requests.num_left:
        by_prompt = itertools.groupby(everything, key=lambda request: request.prompt.index)
        groups = [list(group) for _, group in by_prompt]
        return [list(itertools.chain(*groups[replica::num_replicas])) for replica in range(num_replicas)]
    edges = [len(everything) * replica // num_replicas for replica in range(num_replicas + 1)]
    return [everything[start:end] for start, end in itertools.pairwise(edges)]


def enough_groups(shares: list[list[Request]], num_left: int) -> list[int]:
    """Return how many of its groups each replica completes, so that `num_left` stay unfinished in all.

    Replicas leave groups in proportion to how many they have.
    """
    counts = [len({request.prompt.index for request in requests}) for requests in shares]
    edges = [0, *itertools.accumulate(counts)]
    num_left_before = [num_left * edge // max(edges[-1], 1) for edge in edges]
    num_left_of = [after - before for before, after in itertools.pairwise(num_left_before)]
    return [count - left for count, left in zip(counts, num_left_of, strict=True)]


def request_seed(run_seed: int, index: int, held_out: bool = False) -> int:
    """Return the seed of the completion with this index in the run: a different one for each, the same on any replica.

    So samples do not depend on where or when they are drawn. (Their last digits may, where a batch's size changes the
    order of additions, as in bfloat16 on a GPU.) Half of the run's seeds are for held-out prompts alone, so evaluation
    repeats no training sample.
    """
    return (run_seed % 2**20) * SEEDS_PER_RUN + (SEEDS_PER_RUN // 2 if held_out else 0) + index


def continuation_seed(seed: int, num_tokens: int) -> int:
    """Return the seed with which a completion goes on after its first `num_tokens` tokens; `seed` if it has none yet.

    An engine forgets the state of a request's random numbers, and the same numbers must not come again.
    """
    if not num_tokens:
        return seed
    return CONTINUATIONS + random.Random(f"{seed} {num_tokens}").getrandbits(61)

"""The sampling engine: one vLLM engine per replica, inside its torchrun ranks.

Token ids in, token ids and log-probs out. Text, chat templates and rewards are the driver's. vllm_engine.py
starts engines, loop.py steps them by the shortcuts of shortcuts.py; only these three import vllm.
"""

import collections
import gc
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from tqdm import tqdm

from grpo.config import DataConfig, EvaluationConfig, GeneratorConfig, ModelConfig
from grpo.metrics import set_given_back
from grpo.models.families import has_experts
from grpo.models.hf_folder import read_hf_config
from grpo.roles.engine import vllm_engine
from grpo.roles.engine.episodes import Episodes, completion_of
from grpo.roles.engine.loop import EngineLoop, Stretch, no_collection
from grpo.roles.process_groups import Roles
from grpo.types import Completion, Prompt, Requests

# Of sampling, before its progress is shown
SILENT_SECONDS = 20
# Request seeds: one run's seeds lie in a block of its own, far above any number of samples a run can draw.
SEEDS_PER_RUN = 2**40
# Those of completions that go on are above all blocks.
CONTINUATIONS = 2**62


@dataclass(frozen=True)
class Request:
    """One completion to sample."""

    prompt: Prompt
    index: int
    """Its place in the run, see `Completion.index`."""
    begun: list[int] = field(default_factory=list)
    """Tokens that it has already."""


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
        episodes: Episodes | None = None,
    ):
        """Start the engine (seconds on CPU, 20-95 s on GPU). Collective over the replica, colocated over all ranks.

        episodes: the environments with which completions become conversations.
        """
        self.config, self.seed, self.roles = config, seed, roles
        self.episodes = episodes
        self.version = 0
        self.asleep = False
        vllm_engine.import_vllm(roles)
        more = vllm_engine.in_vllms_types(config.sampling)
        self._parameters = partial(vllm_engine.sampling_params, config, list(stop_token_ids), more)
        self.least_tokens = more.get("min_tokens", 0)
        hf = read_hf_config(folder)
        self.has_experts = has_experts(hf)
        options = vllm_engine.options_of_model(hf, config.engine, roles.device)
        self.llm = vllm_engine.start_engine(config, model, data, seed, folder, roles, options)
        self.loop = EngineLoop(self.llm, vllm_engine.needs_texts(config))

    def generate(
        self,
        requests: Requests,
        group_size: int,
        *,
        temperatures: Sequence[float] | None = None,
        held_out: bool = False,
        max_tokens: int | None = None,
    ) -> list[Completion] | None:
        """Sample this replica's part of `group_size` completions per prompt, until enough groups are complete.

        What was begun before goes on: its tokens are those of this call. `temperatures` (default: the run's) take turns
        within a group; 0 is greedy. `held_out` takes seeds that training never uses. `max_tokens` ends completions
        earlier than the run does, but not before its `min_tokens`, and plays no episodes.

        Returns completions on the replica's first rank, in the order of their `index`, None on its other ranks. An
        exception in here is fatal for the rank: vLLM keeps unfinished requests queued.
        """
        if self.asleep:
            raise RuntimeError("the engine sleeps without weights; they come back with the next sync_weights")
        temperatures = temperatures or self.config.temperature
        limit = self.config.max_completion_tokens
        if max_tokens is not None:
            limit = min(limit, max(max_tokens, self.least_tokens))
        shares, replica = share_out(requests, group_size, len(self.roles.replicas)), self.roles.replica
        enough = enough_groups(shares, requests.num_left)[replica]
        mine = shares[replica] if enough else []

        def facts(number: int) -> tuple[float, int]:
            """A request's temperature, and its completion's index in the run."""
            index = mine[number].index
            return temperatures[index % group_size % len(temperatures)], index

        def add(number: int, ids: list[int], num_tokens: int, max_tokens: int) -> None:
            """Sample behind `ids`, of which `num_tokens` are behind the prompt."""
            temperature, index = facts(number)
            seed = continuation_seed(request_seed(self.seed, index, held_out), num_tokens)
            self.loop.add(number, ids, self._parameters(temperature, seed, max_tokens))

        is_head = self.roles.rank in self.roles.heads
        with no_collection():
            if self.episodes and max_tokens is None:
                rollouts = [(request.prompt, request.index % group_size) for request in mine]
                where = self.seed, self.version, held_out
                episodes = self.episodes.play(self.loop, rollouts, limit, add, *where)
                completions = [completion_of(episode, *facts(n)) for n, episode in enumerate(episodes)]
            else:
                for number, request in enumerate(mine):
                    ids, num_begun = request.prompt.ids + request.begun, len(request.begun)
                    add(number, ids, num_begun, limit - num_begun)
                stretches = self._decode(mine, enough)
                completions = [self._completion(s, *facts(s.request)) for s in stretches] if is_head else []
        return sorted(completions, key=lambda completion: completion.index) if is_head else None

    def _decode(self, requests: list[Request], enough: int) -> list[Stretch]:
        """Run the engine until the requests of `enough` groups have ended; then end the others."""
        num_left, ended = collections.Counter(request.prompt.index for request in requests), []
        first = self.roles.rank == self.roles.heads[0]
        progress = tqdm(total=len(requests), delay=SILENT_SECONDS, mininterval=5, leave=False, disable=not first)
        with progress:
            while self.loop.num_running:
                stretches = self.loop.step()
                ended += stretches
                progress.update(len(stretches))
                num_left.subtract(requests[stretch.request].prompt.index for stretch in stretches)
                if sum(not left for left in num_left.values()) >= enough:
                    return ended + self.loop.end()
        return ended

    def evaluate(
        self, prompts: Sequence[Prompt], options: EvaluationConfig
    ) -> tuple[list[Completion] | None, list[Completion] | None]:
        """This replica's part of the held-out completions: a greedy one and `num_samples` of the options per prompt.

        Leaves nothing behind that training could notice: other seeds, and no prefixes in the cache.
        """
        requests = Requests(list(prompts))
        greedy = self.generate(requests, 1, temperatures=(0.0,), held_out=True)
        samples = self.generate(requests, options.num_samples, temperatures=(options.temperature,), held_out=True)
        self.forget_prefixes()
        return greedy, samples

    def _completion(self, stretch: Stretch, temperature: float, index: int) -> Completion:
        return Completion.of(
            torch.tensor(stretch.ids, dtype=torch.int64),
            torch.tensor(stretch.logprobs, dtype=torch.float32),
            truncated=stretch.reason == "length",
            version=self.version,
            temperature=temperature,
            index=index,
            ended=stretch.reason != "abort",
        )

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        """Take new weights, (HF name, full tensor) of them all, by vLLM's own means; forget every cached prefix.

        Each tensor owns its memory: vLLM may hold on to it until its layer is complete. Collective over the replica's
        ranks, each of which takes every tensor, and as `tensors` is.
        """
        self._wake("weights")
        quantized = any(self.config.engine.get(name) for name in ("quantization", "quantization_config"))
        # repacked (on a CPU) or quantized copies are what the kernels read, and only a full reload makes them again
        if self.roles.device.type == "cpu" or quantized:
            tied = self.llm.llm_engine.model_config.hf_config.tie_word_embeddings
            tensors = _with_tied_head(tensors) if tied else tensors
            for runner in vllm_engine.expert_layers(self.llm) if self.has_experts else ():
                runner._quant_method.moe_kernel = None  # else it goes on with the experts that it packed at its start
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})
        else:  # into the live parameters, in place, so that captured CUDA graphs stay valid
            (model,) = self.llm.collective_rpc(lambda worker: worker.model_runner.get_model())
            model.load_weights(tensors)
            torch.cuda.synchronize()  # so that the time is a sync's own
        self._wake("kv_cache")
        self.asleep = False
        self.forget_prefixes()
        self.version = version

    def forget_prefixes(self) -> None:
        """Empty the prefix cache, so that what comes next is computed as if nothing had been sampled before."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache, so it would sample from stale keys and values")

    def sleep(self) -> None:
        """Give weights and KV cache back to the GPU until the next `load_weights`, if `generator.sleep` says so."""
        if self.config.sleep and self.roles.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info()
            self.llm.sleep(level=2)  # the weights come back with the next sync, so they need no copy on the host
            set_given_back(torch.cuda.mem_get_info()[0] - free)
            self.asleep = True

    def _wake(self, tag: str) -> None:
        if self.asleep:
            torch.cuda.empty_cache()  # the trainer's cached blocks would take the room
            set_given_back(0)
            self.llm.wake_up(tags=[tag])

    def close(self) -> None:
        """Shut the environments and the engine down, with the default process group: nothing may communicate after it.

        On a CPU only what Python would report as left behind goes: the rest takes seconds, and ends with the process.
        """
        if self.episodes:
            self.episodes.close()
        if self.roles.device.type != "cpu":
            self.llm.llm_engine.model_executor.shutdown()
            del self.llm, self.loop
            gc.collect()
        vllm_engine.destroy_groups()


def _with_tied_head(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors:
        yield name, tensor
        if name == "model.embed_tokens.weight":
            yield "lm_head.weight", tensor


# ---- What each replica samples, in which order and with which seeds: by counts alone, so that all ranks find the same


def share_out(requests: Requests, group_size: int, num_replicas: int) -> list[list[Request]]:
    """Each replica's part of a step's completions, in the order in which it begins them, which is that of the prompts.

    Replicas get equal numbers, to the nearest, of neighbouring completions: a group shares the computation of its
    prompt. If groups may be left, they get whole groups in turns, first those that were begun before.
    """
    if not (requests.begun or requests.num_left):
        everything = [request for prompt in requests.prompts for request in _unfinished(prompt, group_size, {})]
        edges = [len(everything) * replica // num_replicas for replica in range(num_replicas + 1)]
        return [everything[start:end] for start, end in itertools.pairwise(edges)]
    prompts = sorted(requests.prompts, key=lambda prompt: prompt.index * group_size not in requests.begun)
    groups = [_unfinished(prompt, group_size, requests.begun) for prompt in prompts]
    return [[r for group in groups[replica::num_replicas] for r in group] for replica in range(num_replicas)]


def _unfinished(prompt: Prompt, group_size: int, begun: dict[int, list[int] | None]) -> list[Request]:
    """The completions of a group that have not ended, or not begun."""
    first = prompt.index * group_size
    so_far = {index: begun.get(index, []) for index in range(first, first + group_size)}
    return [Request(prompt, index, ids) for index, ids in so_far.items() if ids is not None]


def enough_groups(shares: list[list[Request]], num_left: int) -> list[int]:
    """How many of its groups each replica completes, so that `num_left` are left in all.

    These are spread over the replicas in proportion to their groups.
    """
    numbers = [len({request.prompt.index for request in requests}) for requests in shares]
    total, before, enough = sum(numbers), 0, []
    for number in numbers:
        left = [num_left * edge // max(total, 1) for edge in (before, before + number)]
        enough.append(number - (left[1] - left[0]))
        before += number
    return enough


def request_seed(run_seed: int, index: int, held_out: bool = False) -> int:
    """Seed of the completion with this place in the run: distinct for every one, the same on any replica.

    So what is sampled does not depend on where or when. (Where a batch's size changes the order of additions, as in
    bfloat16 on a GPU, its last digits may.)
    Held-out prompts have half of the run's seeds for themselves, so evaluation repeats no training sample.
    """
    return (run_seed % 2**20) * SEEDS_PER_RUN + (SEEDS_PER_RUN // 2 if held_out else 0) + index


def continuation_seed(seed: int, num_tokens: int) -> int:
    """Seed with which a completion goes on after its first `num_tokens` tokens; its own if it has none yet.

    An engine forgets the state of a request's random numbers, which are not to come once more.
    """
    if not num_tokens:
        return seed
    return CONTINUATIONS + random.Random(f"{seed} {num_tokens}").getrandbits(61)

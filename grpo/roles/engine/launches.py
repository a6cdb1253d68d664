"""Plain decode steps of vLLM 0.32.0 on a GPU, launched as CUDA graphs.

vLLM launches the model as one graph. Around it, its runner prepares inputs, samples, and updates the requests' state by
some twenty kernels, each launched by Python: for a small model that takes the host longer than the step takes the GPU.
Here they are two more graphs.

Suffixes: R requests of a step; P rows of the size that vLLM captured, of which the first are the requests.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo.roles.engine.shortcuts import PlainSteps


@dataclass
class _Graphs:
    """The graphs before and after the model, and where they read and write."""

    rows_4P: Tensor
    """int64, four numbers of each row: where the state of its request is read, where it is written (-1: nowhere), its
    seed, its temperature. Rows behind the requests read what the first one reads, and write nothing."""
    before: torch.cuda.CUDAGraph
    after: torch.cuda.CUDAGraph
    sampled_P2: Tensor
    """float64, which is exact for both: tokens and log-probs."""


class _Sampled:
    """The tokens of a step on their way from the GPU, as vLLM's AsyncModelRunnerOutput."""

    def __init__(self, names: list[str], sampled_R2: Tensor):
        """Begin to copy tokens and log-probs of the requests with these names."""
        self._names = names
        self._sampled_R2 = sampled_R2.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event(blocking=True)
        self._copied.record()

    def get_output(self) -> Any:
        """Wait for the copy. Returns a ModelRunnerOutput."""
        from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

        self._copied.synchronize()
        tokens_R1, logprobs_R1 = np.split(self._sampled_R2.numpy(), 2, axis=1)
        return ModelRunnerOutput(
            req_ids=self._names,
            req_id_to_index={name: row for row, name in enumerate(self._names)},
            sampled_token_ids=tokens_R1.astype(int).tolist(),
            logprobs=LogprobsLists(tokens_R1, logprobs_R1, None, None),
        )


class GraphedSteps:
    """Launches plain steps as three graphs, if tokens are sampled at temperature 1 or 0 and by nothing else.

    Replaces `GPUModelRunner.execute_model` and `sample_tokens` (vllm/v1/worker/gpu/model_runner.py) for such steps; all
    others are vLLM's own. Without this the host is the limit of a token step of a model of 0.5B. Log-probs may differ
    in their last digits, because the LM head sees as many rows as the model.
    """

    @staticmethod
    def fit(runner: Any) -> bool:
        """Return whether steps of `runner` do nothing that the graphs leave out.

        What changes from step to step must lie where it lay at the capture, as triton's attention has it.
        """
        backends = [group.backend.get_name() for groups in runner.attn_groups for group in groups]
        return (
            type(getattr(runner, "model_state", None)).__name__ == "DefaultModelState"  # V1, as on CPUs, has none
            and backends == ["TRITON_ATTN"]
            and runner.parallel_config.world_size == 1
            and not runner.uses_inputs_embeds
        )

    def __init__(self, runner: Any, plain: PlainSteps):
        """Replace the methods of `runner`, which must `fit`. plain: says which steps are plain."""
        from vllm.v1.outputs import AsyncModelRunnerOutput

        AsyncModelRunnerOutput.register(_Sampled)
        self._runner = runner
        self._plain = plain
        self._graphs: dict[int, _Graphs] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._step: tuple[_Graphs, list[str]] | None = None  # that was executed and has no tokens yet
        self._execute_model = runner.execute_model
        self._sample_tokens = runner.sample_tokens
        runner.execute_model = self.execute_model
        runner.sample_tokens = self.sample_tokens

    def execute_model(self, scheduled: Any, *arguments: Any, **options: Any) -> Any:
        """Run the model for a step."""
        from vllm.config.compilation import CUDAGraphMode
        from vllm.utils.torch_utils import async_tensor_h2d

        if scheduled is not self._plain.step:
            return self._execute_model(scheduled, *arguments, **options)
        runner = self._runner
        sampler = runner.sampler
        cached = scheduled.scheduled_cached_reqs
        names = cached.req_ids
        num = len(names)
        states_R = np.array([runner.req_states.req_id_to_index[name] for name in names])
        shape = runner.cudagraph_manager.dispatch(num, num, 1, 0, max_query_len=1)
        if shape.cg_mode != CUDAGraphMode.FULL or sampler.needs_logits_processing[states_R].any():
            return self._execute_model(scheduled, *arguments, **options)
        runner.finish_requests(scheduled)
        tables = runner.block_tables
        for state, blocks in zip(states_R, cached.new_block_ids, strict=True):
            if blocks:
                tables.append_block_ids(state, blocks, overwrite=False)
        tables.apply_staged_writes()
        size = shape.num_tokens
        rows_4P = np.full((4, size), -1)
        rows_4P[:2, :num] = states_R
        rows_4P[2, :num] = sampler.sampling_states.seeds.np[states_R]
        rows_4P[3, :num] = sampler.sampling_states.temperature.np[states_R]
        rows_4P[0, num:] = states_R[0]
        if size not in self._graphs:
            self._graphs[size] = self._capture(size)
        graphs = self._graphs[size]
        async_tensor_h2d(rows_4P, out=graphs.rows_4P)
        tables.gather_block_tables(graphs.rows_4P[0], size)
        graphs.before.replay()
        runner.cudagraph_manager.run_fullgraph(shape)
        self._step = graphs, list(names)
        return None

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample the tokens of the step that was executed."""
        if self._step is None:
            return self._sample_tokens(grammar_output)
        graphs, names = self._step
        self._step = None
        graphs.after.replay()
        return _Sampled(names, graphs.sampled_P2[: len(names)])

    def _before_model(self, rows_4P: Tensor) -> None:
        """Write the model's inputs: what was sampled last, its position, and where its keys and values go."""
        from vllm.v1.worker.gpu.input_batch import prepare_pos_seq_lens

        read_P, write_P, _, _ = rows_4P
        size = len(read_P)
        states = self._runner.req_states
        buffers = self._runner.input_buffers
        buffers.is_padding[:size] = False
        buffers.input_ids[:size] = states.last_sampled_tokens[read_P, 0]
        starts = torch.arange(size + 1, out=buffers.query_start_loc[: size + 1])
        prepare_pos_seq_lens(
            read_P,
            starts,
            states.num_computed_tokens.gpu,
            buffers.positions,
            buffers.seq_lens,
        )
        self._runner.block_tables.compute_slot_mappings(
            write_P,
            starts,
            buffers.positions,
            size,
        )

    def _after_model(self, rows_4P: Tensor) -> Tensor:
        """Sample, and update the state of the requests. Returns sampled_P2."""
        from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
        from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores

        runner = self._runner
        _, write_P, seed_P, temperature_P = rows_4P
        size = len(write_P)
        logits_PV = runner.model.compute_logits(runner.cudagraph_manager.hidden_states[:size])
        tokens_P = gumbel_sample(
            logits_PV,
            torch.arange(size, device=logits_PV.device),
            temperature_P.float(),
            seed_P,
            runner.input_buffers.positions[:size],
            apply_temperature=False,
            is_drafting=False,
            use_fp64=runner.sampler.use_fp64_gumbel,
        )
        logprobs_P1 = compute_topk_scores(logits_PV, 0, tokens_P).logprobs
        num_sampled_P = torch.ones_like(write_P, dtype=torch.int32)
        runner.postprocess_sampled(
            write_P,
            tokens_P[:, None],
            num_sampled_P,
            torch.zeros_like(num_sampled_P),
            runner.input_buffers.query_start_loc,
        )
        return torch.cat([tokens_P[:, None].double(), logprobs_P1.double()], dim=1)

    def _capture(self, size: int) -> _Graphs:
        """Capture the graphs of steps of this size."""
        rows_4P = torch.full((4, size), -1, device=self._runner.device)
        rows_4P[0] = 0
        graphs = []
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for work in self._before_model, self._after_model:
                work(rows_4P)  # first without a graph, which compiles the kernels
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                sampled_P2 = work(rows_4P)
                graph.capture_end()
                graphs.append(graph)
        torch.cuda.current_stream().wait_stream(self._stream)
        return _Graphs(rows_4P, *graphs, sampled_P2)

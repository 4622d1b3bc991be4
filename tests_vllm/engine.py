"""A process that starts engines of vLLM, serves requests with each, and prints what came out as one line of JSON.

    python -m tests_vllm.engine '[{"model": …, "settings": {…}, "work": ["together", "alone"]}, …]'

A process of its own, since an engine leaves things behind: numba, which n-gram drafts need, breaks the next one.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1",
    VLLM_LOGGING_LEVEL="INFO",
)  # fmt: skip

import torch

from tests_vllm import oldest  # it prepares vLLM

# The number of prompts, their greatest length, the tokens that follow, and the length of a prefix that is cached; vLLM
# 0.26 runs interpreted kernels here.
COUNT, LONGEST, TOKENS, PREFIX = (3, 16, 12, 40) if oldest.is_installed() else (6, 40, 32, 99)
RESULTS = "results: "  # what the line begins with
COMMON = {
    "skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 8,
    "disable_log_stats": False,
}  # fmt: skip


def main(engines: list[dict[str, Any]]) -> None:
    results = [run(**engine) for engine in engines]
    print(RESULTS + json.dumps(results), flush=True)


def run(model: str, settings: dict[str, Any], work: list[str]) -> dict[str, Any]:
    """What an engine gives for each piece of work, and what it says of itself."""
    from vllm import LLM

    llm = LLM(model, **{**COMMON, **settings})
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    cache = llm.llm_engine.vllm_config.cache_config
    found: dict[str, Any] = {"seeds": []}
    for piece in work:
        found[piece] = WORK[piece](llm)
        found["seeds"] += [int(layer.served.seeds.seed) for layer in layers if getattr(layer, "served", None)][:1]
    found["layers"] = sorted({type(layer).__name__ for layer in layers})
    found["cache"] = {"block": cache.block_size, "mode": cache.mamba_cache_mode}
    found["counts"] = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    del llm
    gc.collect()
    return found


def prompts(count: int, longest: int, seed: int = 1) -> list[list[int]]:
    """Prompts of random lengths; every second repeats some tokens, so that drafts can be right."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=random).tolist()
    drawn = [torch.randint(1, 96, (length,), generator=random).tolist() for length in lengths]
    return [(tokens[:3] * len(tokens))[: len(tokens)] if i % 2 else tokens for i, tokens in enumerate(drawn)]


def parameters(tokens: int, **more: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, logprobs=1, ignore_eos=True, detokenize=False, **more)


def outcome(output: Any) -> dict[str, Any]:
    """The tokens of a request, the logarithms of their probabilities, and how much of its prompt was cached."""
    one = output.outputs[0]
    chosen = [of[token].logprob for token, of in zip(one.token_ids, one.logprobs, strict=True)]
    return {"tokens": list(one.token_ids), "logprobs": chosen, "cached": output.num_cached_tokens or 0}


def together(llm: Any) -> list[dict[str, Any]]:
    given = [{"prompt_token_ids": tokens} for tokens in prompts(COUNT, LONGEST)]
    return [outcome(output) for output in llm.generate(given, parameters(TOKENS), use_tqdm=False)]


def alone(llm: Any) -> list[dict[str, Any]]:
    given = [{"prompt_token_ids": tokens} for tokens in prompts(COUNT, LONGEST)]
    return [outcome(llm.generate(one, parameters(TOKENS), use_tqdm=False)[0]) for one in given]


def in_prompts(llm: Any) -> list[dict[str, Any]]:
    """The same as `alone`, with probabilities of these tokens as parts of prompts: the engine's other way to them."""
    results = alone(llm)
    for tokens, result in zip(prompts(COUNT, LONGEST), results, strict=True):
        whole = {"prompt_token_ids": tokens + result["tokens"]}
        output = llm.generate(whole, parameters(1, prompt_logprobs=1), use_tqdm=False)[0]
        of_prompt = output.prompt_logprobs[len(tokens) :]
        result["logprobs"] = [of[token].logprob for token, of in zip(result["tokens"], of_prompt, strict=True)]
    return results


def prefixes(llm: Any) -> list[dict[str, Any]]:
    """Requests that begin alike, one after the other, and the first of them again."""
    more = torch.randint(1, 96, (PREFIX,), generator=torch.Generator().manual_seed(4)).tolist()
    start = prompts(1, 1, seed=3)[0] + more
    given = [start + end for end in ([], [5, 6, 7], [8], [])]
    return [outcome(llm.generate({"prompt_token_ids": one}, parameters(12), use_tqdm=False)[0]) for one in given]


def arriving(llm: Any) -> dict[str, Any]:
    """200 requests that arrive over time, some of which are aborted; then each that was not, alone."""
    random = torch.Generator().manual_seed(2)
    given = prompts(200, 24, seed=2)
    wanted = torch.randint(1, 13, (200,), generator=random).tolist()
    arrives = torch.randint(0, 300, (200,), generator=random).tolist()
    aborted = {i: arrives[i] + 2 for i in range(0, 200, 10)}
    engine, step, done, stops = llm.llm_engine, 0, {}, 0
    waiting = sorted(range(200), key=lambda i: arrives[i])
    while waiting or engine.has_unfinished_requests():
        while waiting and arrives[waiting[0]] <= step:
            i = waiting.pop(0)
            engine.add_request(str(i), {"prompt_token_ids": given[i]}, parameters(wanted[i]))
        stopped = [str(i) for i, when in aborted.items() if when == step and str(i) not in done]
        engine.abort_request(stopped)
        stops += len(stopped)
        done.update({output.request_id: outcome(output) for output in engine.step() if output.finished})
        step += 1
    left = [i for i in range(200) if str(i) in done and i not in aborted]
    own = {
        str(i): outcome(llm.generate({"prompt_token_ids": given[i]}, parameters(wanted[i]), use_tqdm=False)[0])
        for i in left
    }
    return {"among_others": done, "alone": own, "aborted": sorted(aborted), "stops": stops}


WORK = {"together": together, "alone": alone, "in_prompts": in_prompts, "prefixes": prefixes, "arriving": arriving}

if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

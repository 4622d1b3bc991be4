"""Tokens per second of vLLM with a random Mamba-2, on its own kernels or on flashstate: the rows of results/.

    python -m tools.vllm_speed --backend triton --state float32
    python -m tools.vllm_speed --backend flashstate --state int8

Needs vLLM. All requests start together; weights are drawn in place after the engine has started. A speed is printed
only if a prefill of the text that was generated finds most of its tokens the likeliest too. `as_prefill` is the share
of such tokens: below one where bfloat16 rounds the sums of a prefill otherwise than those of a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PROMPT, OUTPUT, RUNS = 64, 128, 3
HEAD, COLUMNS, VOCABULARY = 64, 128, 50288
CHECKED, MOST = 4, 0.5  # requests, and the share of tokens that a prefill must find too: by chance it finds none
COLUMNS_OF_CSV = "backend,states,rounding,mode,requests,tokens_per_second,fewest,most,ms_per_decode_step,as_prefill"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="flashstate", help="what vLLM calls mamba_backend")
    parser.add_argument("--state", default="float32", help="format of states")
    parser.add_argument("--stochastic", action="store_true", help="round states stochastically, on flashstate")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32, 128, 256])
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=2560)
    given = parser.parse_args()
    rounding, mode = "stochastic" if given.stochastic else "nearest", "eager" if given.eager else "graphs"
    llm = started(given, rounding)
    print(COLUMNS_OF_CSV)
    for requests in given.requests:
        share = found_by_prefill(llm, requests)
        if share < MOST:
            raise SystemExit(
                f"a prefill finds {share:.0%} of the tokens of {requests} requests: their speed is not measured"
            )
        speeds, step = measured(llm, requests)
        cells = [f"{statistics.median(speeds):.1f}", f"{min(speeds):.1f}", f"{max(speeds):.1f}", f"{step:.4f}"]
        cells.append(f"{share:.3f}")
        print(",".join([given.backend, given.state, rounding, mode, str(requests), *cells]), flush=True)


def started(given: argparse.Namespace, rounding: str) -> Any:
    """An engine for so many layers of so many channels."""
    from vllm import LLM

    settings: dict[str, Any] = {"enforce_eager": True}
    if not given.eager:
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sorted(given.requests)}
        settings = {"compilation_config": graphs}
    if given.backend == "flashstate":
        settings["additional_config"] = {"flashstate": {"state": given.state, "rounding": rounding}}
    else:
        settings["mamba_ssm_cache_dtype"] = given.state
    most = max(given.requests)
    llm = LLM(
        str(configuration(given.layers, given.hidden)), load_format="dummy", skip_tokenizer_init=True,
        dtype="bfloat16" if torch.cuda.is_available() else "float32", max_model_len=PROMPT + OUTPUT + 16,
        max_num_seqs=most, max_num_batched_tokens=max(2048, PROMPT * most), enable_prefix_caching=False,
        mamba_backend=given.backend, **settings,
    )  # fmt: skip
    llm.apply_model(draw)
    return llm


def configuration(layers: int, hidden: int) -> Path:
    """Where the configuration of such a model is."""
    folder = Path(tempfile.mkdtemp())
    sizes = {
        "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "vocab_size": VOCABULARY, "hidden_size": hidden,
        "num_hidden_layers": layers, "expand": 2, "head_dim": HEAD, "num_heads": 2 * hidden // HEAD,
        "state_size": COLUMNS, "n_groups": 1, "conv_kernel": 4, "chunk_size": 256, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
    return folder


def draw(model: torch.nn.Module) -> None:
    """Draw parameters such that states last: those that vLLM gives a model without weights are nearly zero."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.numel():
            fill(name.rpartition(".")[2], parameter.data)


def fill(name: str, weight: Tensor) -> None:
    if name == "A":
        weight.uniform_(-16, -1)
    elif name == "dt_bias":
        weight.uniform_(-7, -2)
    elif weight.dim() > 1:
        weight.normal_(std=weight.shape[-1] ** -0.5)
    else:
        weight.fill_(0 if name == "bias" else 1)


def measured(llm: Any, requests: int) -> tuple[list[float], float]:
    """Output tokens per second of some runs, and milliseconds of a decode step: what OUTPUT tokens take beyond one."""
    for _ in range(2):
        seconds(llm, requests, 4)  # compiles
    one = statistics.median(seconds(llm, requests, 1) for _ in range(RUNS))
    every = [seconds(llm, requests, OUTPUT) for _ in range(RUNS)]
    step = (statistics.median(every) - one) / (OUTPUT - 1) * 1e3
    return [requests * OUTPUT / taken for taken in every], step


def found_by_prefill(llm: Any, requests: int) -> float:
    """The share of the tokens of some of so many requests which are the likeliest to a prefill of the same text too."""
    first = min(requests, CHECKED)
    outputs = generated(llm, requests, OUTPUT)[:first]
    texts = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
    found = [
        output.prompt_logprobs[i][text[i]].rank == 1
        for text, output in zip(texts, asked(llm, texts, 1, prompt_logprobs=0), strict=True)
        for i in range(PROMPT, PROMPT + OUTPUT)
    ]
    return statistics.mean(found)


def seconds(llm: Any, requests: int, tokens: int) -> float:
    begun = time.perf_counter()
    generated(llm, requests, tokens)
    return time.perf_counter() - begun


def generated(llm: Any, requests: int, tokens: int) -> list[Any]:
    """What so many requests give: so many tokens each."""
    random = torch.Generator().manual_seed(1)
    return asked(llm, torch.randint(1, VOCABULARY, (requests, PROMPT), generator=random).tolist(), tokens)


def asked(llm: Any, prompts: list[list[int]], tokens: int, **more: Any) -> list[Any]:
    from vllm import SamplingParams

    wanted = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **more)
    return list(llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], wanted, use_tqdm=False))


if __name__ == "__main__":
    main()

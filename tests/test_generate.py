"""flashstate generate: both rows, equal tokens, drafts, int8 by replay, and what is refused; on tiny random models."""

import re
import sys
from pathlib import Path

import pytest
import torch
from printed import output_of
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flashstate import basics
from flashstate.cli import main
from flashstate.generate import Stopwatch, verdict
from flashstate.integrations.transformers.tiny import FAMILIES, tiny_model

SHORT = ["generate", "--device", "cpu", "--tokens", "10"]


def cells(out: str, row: str) -> list[str]:
    """The numbers of a row of the table: tokens per second, bytes of state, bytes of the cache, accepted drafts."""
    found = re.search(rf"{row}((?: (?:[\d,.]+|none))+)", out)
    assert found is not None, out
    return found[1].split()


@pytest.mark.parametrize("family", ["mamba2", "qwen3_next"])
def test_both_ways_give_the_same_tokens_in_float32_also_with_drafts(
    family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    drafts = ["--static", "--drafts", "3", "--tokens", "24"] if family == "qwen3_next" else ["--batch", "2"]
    assert main([*SHORT, "--family", family, *drafts]) == 0
    out, tokens = output_of(capsys), 24 if family == "qwen3_next" else 10
    assert f"Model: a tiny random {family}, float32, run by the reference on the CPU." in out
    how = "; up to 3 drafts per step by prompt lookup; a cache of fixed size" if tokens == 24 else ""
    (shown,) = re.findall(rf"State: float32{how}\.((?: \d+)+) ", out)
    assert len(shown.split()) == tokens
    for row in ("transformers alone", "with flashstate"):
        speed, state, cache, *_ = cells(out, row)
        assert float(speed.replace(",", "")) > 0
        assert (state == cache) == (family == "mamba2"), "a hybrid's cache has keys and values too"
    assert f"Both gave the same {tokens} tokens." in out
    if tokens == 24:
        assert cells(out, "transformers alone")[-1] == "none"
        assert 0 < float(cells(out, "with flashstate")[-1]) <= 3


def test_int8_states_that_can_be_replayed_are_unless_told_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    for options, said in (
        (["--family", "mamba2"], "State: int8; by replay with a window of 16, unless --replay 0."),
        (["--replay", "0", "--rounding", "stochastic"], "State: int8 stochastic."),
        (["--family", "mamba"], "State: int8."),
    ):
        assert main([*SHORT, "--state", "int8", *options]) == 0
        out = output_of(capsys)
        assert said in out
        assert re.search(r"Both gave the same 10 tokens|The first \d+ of 10 tokens are the same", out)


def test_a_model_of_a_folder_speaks_with_its_own_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = {word: index for index, word in enumerate(["<unk>", *map(str, range(95))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(tmp_path)
    tiny_model("mamba2").save_pretrained(tmp_path)
    assert main([*SHORT, "--model", str(tmp_path), "--prompt", "3 1 4 1 5", "--dtype", "float32"]) == 0
    out = output_of(capsys)
    assert f"Model: {tmp_path}, float32" in out
    assert "Prompt: 5 tokens, in 1 row." in out
    assert "Both gave the same 10 tokens." in out


def test_a_bad_option_exits_with_2_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, complaint in (
        (["--family", "mamba2", "--model", "x"], "--family is of a random model, and --model names another, 'x'"),
        (["--drafts", "2", "--batch", "2"], "--drafts needs --batch 1, got 2"),
        (["--rounding", "stochastic"], "float32 has no rounding 'stochastic', only nearest"),
        (["--prompt", ""], "--prompt must have at least one token, got none"),
        *(
            (
                ["--model", path, "--prompt", "-a=b c"],
                f"--model must be a folder, or a name on the hub such as owner/name, got {path!r}",
            )
            for path in ("/none", "./none", "../none", "none/..")
        ),
    ):
        assert main([*SHORT, *argv]) == 2
        assert complaint in capsys.readouterr().err


def test_the_command_line_knows_the_families_there_are() -> None:
    assert list(basics.FAMILIES) == list(FAMILIES)


def test_without_transformers_the_error_says_how_to_install_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("flashstate.integrations.transformers")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(SHORT) == 2
    assert "transformers is not installed: pip install 'flashstate[transformers]'" in capsys.readouterr().err


def test_a_stopwatch_times_steps_after_the_first_and_not_what_shows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 3.0, 5.0, 6.0, 9.0])  # the prompt; steps as they come and are shown
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    shown: list[list[int]] = []
    watch = Stopwatch(1, lambda row: shown.append(row.tolist()))
    for tokens in ([[7, 7, 7]], [1], [[2, 3, 4]]):
        watch.put(torch.tensor(tokens))
    assert (shown, watch.steps, watch.seconds) == ([[1], [2, 3, 4]], [1, 3], 6.0 - 5.0)


def test_the_verdict_counts_tokens_that_agree_from_the_start_in_every_row() -> None:
    alone = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4]])
    assert verdict(alone, torch.tensor([[1, 2, 3, 4], [1, 2, 9, 4]])) == "The first 2 of 4 tokens are the same."
    assert verdict(alone, alone[:, :3]) == "The first 3 of 4 tokens are the same."

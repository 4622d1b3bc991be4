"""What flashstate recognises in a release of vLLM, and what becomes of layers in copies of it with one change."""

from __future__ import annotations

from tests_vllm import driving  # it prepares vLLM

# isort: split
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec

from flashstate.integrations.vllm import contract, upstream
from flashstate.integrations.vllm.contract import Sources
from flashstate.integrations.vllm.kinds import BACKENDS, CHOOSING, DRAFTS, KINDS, LAYERS, PAGES
from tests_vllm.driving import KIMI, MAMBA2, OLMO, QWEN, Batch

DECODES, MAMBA2_TYPE = Batch(decodes=[3, 5, 1]), MambaAttentionBackendEnum.MAMBA2
QWEN_FILE, KIMI_FILE = (f"{LAYERS}/gdn/{model}_gdn_linear_attn.py" for model in ("qwen", "kimi"))
OLMO_FILE, MIXER2 = f"{LAYERS}/gdn/olmo_gdn_linear_attn.py", f"{LAYERS}/mamba_mixer2.py"
STATES = "        ssm_state = self_kv_cache[1]"
DELTA = ("QwenGatedDeltaNetAttention", "OlmoHybridGatedDeltaNetAttention", "KimiGatedDeltaNetAttention")

# The file of an edit, the edit, and the fact that is then not known of some kinds.
DOCTORED: dict[str, tuple[str, str, str, str, tuple[str, ...]]] = {
    "a renamed argument of a call": (
        MIXER2, " conv_state_indices=state_indices_tensor_d,", " rows=state_indices_tensor_d,",
        "MambaMixer2.conv_ssm_forward calls causal_conv1d_update(_, state, _, _, _, ", ("MambaMixer2",),
    ),
    "a new call with states": (
        OLMO_FILE, STATES, f"{STATES}\n        step_all_tokens(mixed_qkv, ssm_state, out=core_attn_out)",
        "OlmoHybridGatedDeltaNetAttention._forward_core calls step_all_tokens(_, state, out)", DELTA[1:2],
    ),
    "a new method with states": (
        OLMO_FILE, "    def _forward_core(",
        "    def step(self, b):\n        return self.kv_cache\n\n    def _forward_core(",
        "OlmoHybridGatedDeltaNetAttention.step takes (self, b)", DELTA[1:2],
    ),
    "another parameter of a method that flashstate replaces": (
        MIXER2, "    def conv_ssm_forward(\n        self,", "    def conv_ssm_forward(\n        self, gate,",
        "MambaMixer2.conv_ssm_forward takes (self, gate, projected_states, output)", ("MambaMixer2",),
    ),
    "another order of parameters of a function that flashstate answers": (
        f"{LAYERS}/ops/causal_conv1d.py", "    num_accepted_tokens: torch.Tensor | None = None,\n    query_start_loc",
        "    lengths: torch.Tensor | None = None,\n    query_start_loc",
        "causal_conv1d_update takes (x, conv_state, ", tuple(kind.name for kind in KINDS),
    ),
    "a changed builder": (
        f"{BACKENDS}/gdn_attn.py", "        query_start_loc = m.query_start_loc", "        query_start_loc = m.starts",
        "GDNAttentionMetadataBuilder has the source ", DELTA,
    ),
    "a changed backend of selective_state_update": (
        f"{LAYERS}/ops/ssu_dispatch.py", "class MambaSSUBackend(ABC):", "class MambaSSUBackend(ABC):\n    steps = 1",
        "MambaSSUBackend has the source ", ("MambaMixer2", "MambaMixer"),
    ),
    "a flag that chooses a fused kernel": (
        QWEN_FILE, "self.enable_fused_gdn_", "self.use_fused_gdn_",
        "QwenGatedDeltaNetAttention.__init__ has the source ", DELTA[:1],
    ),
    "states that prefill stores otherwise": (
        OLMO_FILE, "last_recurrent_state.to(", "last_recurrent_state.mT.to(",
        "OlmoHybridGatedDeltaNetAttention._forward_core stores ssm_state[non_spec_state_indices_tensor] = ", DELTA[1:2],
    ),
    "calls from another module": (
        KIMI_FILE, "kimi_k3.nvidia.ops.third_party.kda ", "kimi_k3.nvidia.ops.third_party.kda.fused_recurrent ",
        "KimiGatedDeltaNetAttention imports fused_recurrent_kda from ", DELTA[2:],
    ),
    "another null block": (
        f"{BACKENDS}/utils.py", "NULL_BLOCK_ID = 0", "NULL_BLOCK_ID = -1",
        "NULL_BLOCK_ID has the source ", tuple(kind.name for kind in KINDS),
    ),
    "another size of pages": (
        "platforms/interface.py", "mamba_page_size = MambaSpec(", "mamba_page_size = 2 * MambaSpec(",
        "Platform._align_hybrid_block_size has the source ", ("pages",),
    ),
    "layers that are made in another way": (
        "model_executor/custom_op.py", "        return super().__new__(layer_cls_to_instantiate)",
        "        return super().__new__(layer_cls_to_instantiate, 1)",
        "PluggableLayer.__new__ has the source ", ("choosing",),
    ),
}  # fmt: skip


def files() -> set[str]:
    """The files of vLLM that facts are read from."""
    places = {*CHOOSING, *PAGES, *DRAFTS, *(place for kind in KINDS for place in kind.sources)}
    found = {kind.file for kind in KINDS} | {place.partition("::")[0] for place in places} | {"_version.py"}
    sources = upstream.sources()
    for kind in KINDS:
        for call in kind.calls:
            found |= {place.partition("::")[0] for place in sources.origins(kind.file, call.name)}
    # What a name goes through from its import to its definition.
    return found | {str(path.relative_to(sources.root)) for path in sources.root.glob("**/kda/__init__.py")} | {
        str(path.relative_to(sources.root)) for path in sources.root.glob("third_party/**/ops/__init__.py")
    }  # fmt: skip


def doctored(folder: Path, name: str) -> Sources:
    """The sources of this release with one change."""
    changed, before, after, *_ = DOCTORED[name]
    for file in files():
        if (upstream.sources().root / file).is_file():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(upstream.sources().root / file, folder / file)
    text = (folder / changed).read_text("utf-8")
    if before not in text:
        pytest.skip("this release has no such line")
    (folder / changed).write_text(text.replace(before, after), "utf-8")
    return Sources(folder)


@pytest.mark.release
def test_everything_in_this_release_is_recognised() -> None:
    sources = upstream.sources()
    assert not [str(fact) for of in (*KINDS, CHOOSING, PAGES, DRAFTS) for fact in contract.unknown(sources, of)]
    assert str(sources.root) in str(sys.modules["vllm"].__file__)


@pytest.mark.release
@pytest.mark.parametrize("name", DOCTORED)
def test_a_change_is_refused_by_name_and_takes_no_other_kind_with_it(name: str, tmp_path: Path) -> None:
    sources, says, refused = doctored(tmp_path, name), *DOCTORED[name][3:]
    parts = {**{kind.name: kind for kind in KINDS}, "pages": PAGES, "choosing": CHOOSING}
    found = {part: list(map(str, contract.unknown(sources, of))) for part, of in parts.items()}
    assert {part for part, facts in found.items() if facts} == set(refused)
    assert all(facts[0].startswith(says) for part, facts in found.items() if part in refused)


@pytest.fixture
def on_gpus() -> Any:
    with mock.patch.object(upstream, "on_cuda", return_value=True):
        yield


@pytest.mark.usefixtures("on_gpus")
def test_a_kind_that_is_not_recognised_is_left_to_vllm_with_one_line(tmp_path: Path) -> None:
    """A changed builder leaves the delta rules; Mamba-2 is served; formats and stochastic rounding are refused."""
    sources = doctored(tmp_path, "a changed builder")
    version = upstream.sources().version
    why = "itself, since flashstate does not know that GDNAttentionMetadataBuilder has the source [0-9a-f]{12}"
    with mock.patch.object(upstream, "sources", return_value=sources), mock.patch.object(upstream, "_left", set()):
        with mock.patch.object(upstream.logger, "warning") as warned:
            for family in (QWEN, OLMO, KIMI):
                for _ in range(2):
                    assert type(driving.drive(family, DECODES, {}).layer) is family.stock
            assert type(driving.drive(MAMBA2, DECODES, {}).layer).__name__ == "FlashstateMambaMixer2"
        assert warned.call_count == 3
        said = [call.args[0] % call.args[1:] for call in warned.call_args_list]
        for line, family in zip(said, (QWEN, OLMO, KIMI), strict=True):
            assert re.fullmatch(rf"vLLM {version} runs layers of {family.name} {why}", line)
        for options in ({"state": "int8"}, {"rounding": "stochastic"}):
            with pytest.raises(ValueError, match=f"leave out state and stochastic rounding: .* {QWEN.name} {why}"):
                driving.drive(QWEN, DECODES, options)


def test_pages_of_an_unknown_size_take_no_other_format(tmp_path: Path) -> None:
    with mock.patch.object(upstream, "sources", return_value=doctored(tmp_path, "another size of pages")):
        assert type(driving.drive(MAMBA2, DECODES, {}).layer).__name__ == "FlashstateMambaMixer2"
        with pytest.raises(ValueError, match=r"leave out state: .* Platform\._align_hybrid_block_size has the source "):
            driving.drive(MAMBA2, DECODES, {"state": "int8"})


def test_a_kind_whose_call_is_not_where_it_was_is_left_too() -> None:
    gone = AttributeError("causal_conv1d_update is not in a module")
    with (
        mock.patch.object(upstream, "_left", set()),
        mock.patch.object(upstream, "_classes", {}),
        mock.patch.object(upstream, "answer_calls", side_effect=gone),
        mock.patch.object(upstream.logger, "warning") as warned,
    ):
        assert type(driving.drive(MAMBA2, DECODES, {}).layer) is MAMBA2.stock
    assert warned.call_args.args[-1].endswith(f"itself, since flashstate failed: {gone}")


def test_vllm_runs_mamba_on_its_own_kernels_where_its_backends_are_not_recognised(tmp_path: Path) -> None:
    """The engine starts with our flag, on vLLM's backend."""
    dispatch = driving.ssu_dispatch
    group = SimpleNamespace(kv_cache_spec=mock.Mock(spec=MambaSpec, mamba_type=MAMBA2_TYPE))
    registered = {kind: of for kind, of in dispatch._BACKEND_REGISTRY.items() if kind is not upstream.add_backend()}
    with (
        mock.patch.object(
            upstream, "sources", return_value=doctored(tmp_path, "a changed backend of selective_state_update")
        ),
        mock.patch.object(dispatch, "_BACKEND_REGISTRY", registered),
        mock.patch.object(dispatch, "_mamba_ssu_backend", None),
    ):
        driven = driving.drive(MAMBA2, DECODES, {})
        assert type(driven.layer) is MAMBA2.stock
        dispatch.initialize_mamba_ssu_backend(driven.config.mamba_config, SimpleNamespace(kv_cache_groups=[group]))
        assert type(dispatch._mamba_ssu_backend) is dispatch.TritonSSUBackend


def test_info_prints_the_table_and_starts_no_engine() -> None:
    program = (
        "import sys; from flashstate.cli import main; status = main(['info', 'vllm']); "
        "assert not [name for name in sys.modules if name.startswith('vllm.')]; sys.exit(status)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[0].startswith(f"vLLM {upstream.sources().version} in ")
    for kind in KINDS:
        assert [line.split()[-1] for line in lines if line.split()[:1] == [kind.name]] == ["yes"]

"""mamba3_step, Mamba3State and Rotary: wrong input is refused by name, and all four states keep their bytes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from refusals import (
    WRONG_SLOTS,
    Arguments,
    Change,
    Refusal,
    at,
    both,
    columns,
    given,
    on_meta,
    only,
    refuses_change,
    resized,
    strided,
    table,
    transposed,
)
from torch import Tensor

from flashstate import Mamba3State, Rotary, Slots, State, debug, mamba3_step

BATCH, T, H, G, D, N, R, S, SLOTS = 3, 2, 4, 2, 6, 8, 3, 3, 7
TOKEN_AXES = {"one token": ("batch",), "several tokens": ("batch", "T"), "packed": ("tokens",)}
TOKEN_SIZES = {"one token": (BATCH,), "several tokens": (BATCH, T), "packed": (BATCH + T,)}
PACKED = torch.tensor([0, 2, 2, 5])
SHAPES = {  # behind the tokens, or of all
    **dict.fromkeys(("x", "z", "out"), ("H", "D")),
    **dict.fromkeys(("A", "dt", "trap"), ("H",)),
    **dict.fromkeys(("B", "C"), ("R", "G", "N")),
    **dict.fromkeys(("Wx", "Wz", "Wo"), ("R", "H", "D")),
    "D": ("H",),
    "rotary.angle": ("S",),
    **dict.fromkeys(("rotary.bias_B", "rotary.bias_C"), ("R", "H", "N")),
}
SHARED = ("Wx", "Wz", "Wo", "D", "rotary.bias_B", "rotary.bias_C")  # by all tokens
SIZES = {"H": H, "G": G, "D": D, "N": N, "R": R, "S": S}


def axes_of(name: str, form: str) -> tuple[str, ...]:
    return SHAPES[name] if name in SHARED else (*TOKEN_AXES[form], *SHAPES[name])


def state_arguments(cols: int = N) -> Arguments:
    """The arguments of a Mamba3State that is right."""
    generator = torch.Generator().manual_seed(1)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(SLOTS, *sizes, generator=generator)

    ssm = State(normal(H, D, cols).half(), rounding="stochastic", seed=torch.arange(SLOTS))
    return {"ssm": ssm, "k": normal(R, H, cols).half(), "v": normal(H, D).bfloat16(), "angle": normal(H, S) % 1}


def arguments_of(form: str = "one token", cols: int = N) -> Arguments:
    """All arguments of a call that is right."""
    generator, sizes = torch.Generator().manual_seed(2), {**SIZES, "N": cols}

    def made(name: str) -> Tensor:
        shape = [sizes[axis] for axis in SHAPES[name]]
        values = torch.randn(*(() if name in SHARED else TOKEN_SIZES[form]), *shape, generator=generator)
        return values.sigmoid() if name in ("dt", "trap") else values.half() if name in ("x", "B", "out") else values

    tensors = {name: made(name) for name in SHAPES}
    turned = {name.removeprefix("rotary."): tensors.pop(name) for name in list(tensors) if name.startswith("rotary.")}
    read = torch.tensor([5, 0, 3])
    return {
        "state": Mamba3State(**state_arguments(cols)),
        **tensors,
        "rotary": Rotary(**turned),
        "trap_logit": False,
        "update_kv": True,
        "slots": Slots(read, cu_seqlens=PACKED, max_len=3) if form == "packed" else read,
        "update": True,
    }


def change_of(name: str, change: Callable[[Tensor], Any]) -> Change:
    """Of an argument, or of a field of rotary."""
    if not name.startswith("rotary."):
        return only(name, change)
    field = name.removeprefix("rotary.")
    return lambda a: {"rotary": replace(a["rotary"], **{field: change(getattr(a["rotary"], field))})}


def wrong_kinds(name: str, form: str) -> list[Refusal]:
    """What is wrong for every tensor but those of states and slots."""
    allowed, axes = "float16" if name == "out" else "float32 or bfloat16 or float16", axes_of(name, form)
    shape = rf"^{name} must have shape \({axes[0]}.*\), got \("
    changes: list[tuple[str, Callable[[Tensor], Any], type[Exception], str]] = [
        ("a list", Tensor.tolist, TypeError, f"^{name} must be a tensor, got list"),
        ("a float", lambda t: 1.0, TypeError, f"^{name} must be a tensor, got float"),
        ("elsewhere", on_meta, ValueError, f"^{name} is on meta, but the state is on cpu"),
        ("sparse", Tensor.to_sparse, TypeError, f"^{name} must be a dense tensor"),
        ("of much higher rank", lambda t: t[None, None, None], ValueError, shape),
    ]
    for kind in ("float64", "int32", "bool", "float8_e4m3fn"):
        message = f"^{name} must be {allowed}, got {kind}"
        changes.append((kind, lambda t, kind=kind: t.to(getattr(torch, kind)), TypeError, message))
    for axis, word in enumerate(axes):
        if (name == "x" and axis < len(TOKEN_AXES[form])) or (name, word) == ("B", "G"):
            continue  # others must have the sizes that these have
        for by in (-1, 1):
            resize = lambda t, axis=axis, by=by: resized(t, axis, by)  # noqa: E731
            changes.append((f"with {word} {by:+}", resize, ValueError, shape))
    return [(f"{form}: {name} {what}", change_of(name, change), *rest) for what, change, *rest in changes]


def wrong_strides(name: str, form: str) -> list[Refusal]:
    along_rows = name in ("x", "z", "out", "B", "C", "rotary.angle")
    if not (along_rows or name in SHARED):
        return []
    message = rf"^{name} must be contiguous{' along its last axis' if along_rows else ''}, got strides \("
    changes = (("strided", strided), ("expanded", lambda t: t[..., :1].expand_as(t)))
    return [(f"{form}: {name} {what}", change_of(name, change), ValueError, message) for what, change in changes]


def wrong_tokens(form: str) -> list[Refusal]:
    """Tokens that x has and others do not; A is the next that is looked at."""
    refusals: list[Refusal] = []
    for axis, (word, size) in enumerate(zip(TOKEN_AXES[form], TOKEN_SIZES[form], strict=True)):
        longer = only("x", lambda t, axis=axis: resized(t, axis, 1))
        refusals.append((f"{form}: x with {word} +1", longer, ValueError, rf"^A must have shape \(.*{word}={size + 1}"))
    if form == "packed":
        return refusals
    other = only("x", lambda t: t[0] if form == "several tokens" else t[None])  # is of the other form
    return [*refusals, (f"{form}: x of the other form", other, ValueError, r"^A must have shape \(batch")]


def wrong_groups(form: str) -> list[Refusal]:
    message, sizes = f"^B must have a number of groups that divides the {H} heads, got ", TOKEN_SIZES[form]
    return [
        *[
            (f"{form}: {n} groups", given(B=value, C=value), ValueError, f"{message}{n}")
            for n in (0, 3, 8)
            for value in [torch.zeros(*sizes, R, n, N)]
        ],
        (
            f"{form}: C with other groups than B",
            only("C", lambda t: t[..., :1, :]),
            ValueError,
            rf"^C must have shape .*G={G}.*, got \(",
        ),
    ]


def tensor_refusals(form: str) -> list[Refusal]:
    names = [name for name in SHAPES if name not in SHARED or form == "one token"]
    of_each = [refusal for name in names for refusal in (*wrong_kinds(name, form), *wrong_strides(name, form))]
    return [*of_each, *wrong_tokens(form), *wrong_groups(form)]


TENSORS = [refusal for form in TOKEN_AXES for refusal in tensor_refusals(form)]


@table(TENSORS)
def test_a_wrong_tensor_is_refused_by_name(
    request: pytest.FixtureRequest, change: Change, error: type[Exception], message: str
) -> None:
    form = request.node.callspec.id.partition(":")[0]
    refuses_change(mamba3_step, arguments_of(form), change, error, message)


OVERLAPS = r"^out must not overlap itself, got strides \("
PER_RANK = rf"^out must have shape \(batch={BATCH}, R={R}, H={H}, D={D}\), got \({BATCH}, {H}, {D}\)"
SUMMED = rf"^out must have shape \(batch={BATCH}, H={H}, D={D}\), got \({BATCH}, {R}, {H}, {D}\)"
OUTPUTS: list[Refusal] = [
    ("one row for all", only("out", lambda t: t[:1].expand_as(t)), ValueError, OVERLAPS),
    ("one head for all", only("out", lambda t: t[:, :1].expand_as(t)), ValueError, OVERLAPS),
    ("overlapping heads", only("out", lambda t: t.as_strided(t.shape, (H * D, 3, 1))), ValueError, OVERLAPS),
    ("of the dtype of C", only("out", Tensor.float), TypeError, "^out must be float16, got float32"),
    ("summed, without Wo", given(Wo=None), ValueError, PER_RANK),
    ("x, without Wo", lambda a: {"Wo": None, "out": a["x"]}, ValueError, PER_RANK),
    ("per rank, with Wo", only("out", lambda t: t[:, None].repeat(1, R, 1, 1)), ValueError, SUMMED),
    (
        "one rank for all",
        lambda a: {"Wo": None, "out": a["out"][:, None].expand(-1, R, -1, -1)},
        ValueError,
        OVERLAPS,
    ),
]


@table(OUTPUTS)
def test_a_wrong_output_is_refused_by_name(change: Change, error: type[Exception], message: str) -> None:
    refuses_change(mamba3_step, arguments_of(), change, error, message)


NO_TREES = "^slots must not have parents: mamba3_step has no draft trees"
ENTRIES = "must have an entry for each of the 1 tokens, got shape"
NO_WRITE = "^update=False writes no state, so slots must not have write"
OTHERS: list[Refusal] = [
    *WRONG_SLOTS,
    *[
        (f"{name} missing", given(**{name: None}), TypeError, f"^{name} must be a tensor, got NoneType")
        for name in ("x", "A", "dt", "trap", "B", "C")
    ],
    *[
        (f"{name} {value!r}", given(**{name: value}), TypeError, f"^{name} must be True or False, got {value!r}")
        for name in ("trap_logit", "update_kv", "update")
        for value in (1, 0, None, "yes")
    ],
    *[
        (f"state {what}", only("state", change), TypeError, f"^state must be a Mamba3State, got {got}")
        for what, change, got in (
            ("missing", lambda s: None, "NoneType"),
            ("a State", lambda s: s.ssm, "State"),
            ("a tensor", lambda s: s.ssm.data, "Tensor"),
            ("a tuple", lambda s: (s.ssm, s.k, s.v), "tuple"),
        )
    ],
    ("state elsewhere", only("state", on_meta), ValueError, "^x is on cpu, but the state is on meta"),
    (
        "everything elsewhere",
        lambda a: {name: on_meta(value) for name, value in a.items()},
        ValueError,
        "^state is on meta; flashstate runs on cuda and cpu",
    ),
    (
        "a state of other heads",
        given(state=Mamba3State(torch.zeros(SLOTS, 3, D, N), torch.zeros(SLOTS, R, 3, N), torch.zeros(SLOTS, 3, D))),
        ValueError,
        rf"^x must have shape \(batch, H=3, D={D}\) or ",
    ),
    (
        "a state of another rank",
        only("state", lambda s: Mamba3State(s.ssm, s.k[:, :2].clone(), s.v, s.angle)),
        ValueError,
        rf"^B must have shape \(batch={BATCH}, R=2, G, N={N}\), got ",
    ),
    (
        "a state without angles",
        only("state", lambda s: Mamba3State(s.ssm, s.k, s.v)),
        ValueError,
        r"^rotary needs a state with angle: Mamba3State\(ssm, k, v, angle\)",
    ),
    (
        "a state of fewer angles",
        only("state", lambda s: Mamba3State(s.ssm, s.k, s.v, s.angle[..., :2].clone())),
        ValueError,
        rf"^rotary.angle must have shape \(batch={BATCH}, S=2\) or \(batch={BATCH}, H={H}, S=2\), got \({BATCH}, {S}\)",
    ),
    (
        "angles of other heads",
        change_of("rotary.angle", lambda t: t[:, None].repeat(1, 3, 1)),
        ValueError,
        rf"^rotary.angle must have shape \(batch={BATCH}, H={H}, S={S}\) or \(batch={BATCH}, S={S}\), got ",
    ),
    ("no angles", change_of("rotary.angle", lambda t: None), TypeError, "^rotary.angle must be a tensor, got NoneType"),
    ("rotary a tensor", only("rotary", lambda r: r.angle), TypeError, "^rotary must be a Rotary or None, got Tensor"),
    ("rotary True", given(rotary=True), TypeError, "^rotary must be a Rotary or None, got bool"),
    ("slots too short", only("slots", lambda t: t[:2]), ValueError, "^slots must have 3 rows, .* got 2"),
    ("slots too long", only("slots", lambda t: resized(t, 0, 1)), ValueError, "^slots must have 3 rows, .* got 4"),
    (
        "no slots for a batch larger than the pool",
        lambda a: {
            "slots": None,
            "state": Mamba3State(*(t[:2] for t in (a["state"].ssm.data, a["state"].k, a["state"].v, a["state"].angle))),
        },
        ValueError,
        "^slots must be given for a batch of 3 on a pool of 2 slots",
    ),
    ("write and no update", both(given(update=False), at(write=lambda t: t)), ValueError, NO_WRITE),
    ("writes and no update", both(given(update=False), at(write=columns(1))), ValueError, NO_WRITE),
    ("write for two tokens", at(write=columns(2)), ValueError, rf"^slots.write {ENTRIES} \(3, 2\)"),
    (
        "counts without slots to choose from",
        at(accepted=torch.ones_like),
        ValueError,
        r"^slots.accepted needs read \(batch, n\) to choose from, got read \(3,\)",
    ),
    ("a tree", both(given(update=False), at(parents=columns(1))), ValueError, NO_TREES),
    ("a tree with slots per token", at(parents=columns(1), write=columns(1)), ValueError, NO_TREES),
    ("a tree in place", at(parents=columns(1)), ValueError, NO_TREES),
    ("Wz without z", given(z=None), ValueError, "^Wz must come with z"),
    ("snapshots", given(snapshots=torch.zeros(3, 1, H, D, N)), TypeError, "unexpected keyword argument 'snapshots'"),
]


@table(OTHERS)
def test_other_wrong_arguments_are_refused_by_name(change: Change, error: type[Exception], message: str) -> None:
    refuses_change(mamba3_step, arguments_of(), change, error, message)


def test_an_odd_number_of_columns_cannot_be_turned_in_pairs() -> None:
    message = "^rotary needs an even number of columns, got N = 7"
    refuses_change(mamba3_step, arguments_of(cols=7), given(), ValueError, message)
    mamba3_step(**{**arguments_of(cols=7), "rotary": None})


DEBUGGED: list[Refusal] = [
    ("two rows", only("slots", lambda t: t[[0, 1, 1]]), ValueError, "^slots write slot 0 more than once: rows 1, 2"),
    (
        "two rows elsewhere",
        at(write=lambda t: t * 0 + 1),
        ValueError,
        "^slots write slot 1 more than once: rows 0, 1, 2",
    ),
    ("another row's", at(write=lambda t: t.flip(0)), ValueError, "^slots let row 0 write slot 3, which row 2 reads"),
    ("a slot past the pool", only("slots", lambda t: t + SLOTS), IndexError, "read slot 12"),
]


@table(DEBUGGED)
def test_rows_that_meet_are_found_by_debug(change: Change, error: type[Exception], message: str) -> None:
    with debug():
        refuses_change(mamba3_step, arguments_of(), change, error, message)


def test_packed_rows_that_are_out_of_order_are_found_by_debug() -> None:
    falling = at(cu_seqlens=PACKED.flip(0))
    with debug():
        refuses_change(mamba3_step, arguments_of("packed"), falling, ValueError, "^slots.cu_seqlens ")


def of_slot(name: str) -> str:
    return rf"^{name} must be contiguous within a slot: strides \(any, "


STATES: list[Refusal] = [
    *[
        (f"{name} {what}", only(name, change), error, message)
        for name, axes in (("k", "slots=7, R, H=4, N=8"), ("v", "slots=7, H=4, D=6"), ("angle", "slots=7, H=4, S"))
        for what, change, error, message in (
            ("a list", Tensor.tolist, TypeError, f"^{name} must be a tensor, got list"),
            ("elsewhere", on_meta, ValueError, f"^{name} is on meta, but the state is on cpu"),
            ("sparse", Tensor.to_sparse, TypeError, f"^{name} must be a dense tensor"),
            ("float64", Tensor.double, TypeError, rf"^{name} must be float32( or bfloat16 or float16)?, got float64"),
            ("int8", Tensor.char, TypeError, f"^{name} must be float32.*, got int8"),
            ("of lower rank", lambda t: t[0], ValueError, rf"^{name} must have shape \({axes}\), got \("),
            ("of higher rank", lambda t: t[None], ValueError, rf"^{name} must have shape \({axes}\), got \("),
            ("of fewer slots", lambda t: t[:6], ValueError, rf"^{name} must have shape \({axes}\), got \(6, "),
            ("strided", strided, ValueError, of_slot(name)),
            ("one slot for all", lambda t: t[:1].expand_as(t), ValueError, f"^{name} has overlapping slots"),
        )
    ],
    ("k missing", given(k=None), TypeError, "^k must be a tensor, got NoneType"),
    ("v missing", given(v=None), TypeError, "^v must be a tensor, got NoneType"),
    (
        "k of other heads",
        only("k", lambda t: resized(t, 2, 1)),
        ValueError,
        r"^k must have shape \(.*, got \(7, 3, 5, 8",
    ),
    ("k of other columns", only("k", lambda t: resized(t, 3, -1)), ValueError, r"^k must have shape \(.*, got "),
    (
        "k of no rank",
        only("k", lambda t: t[:, :0]),
        ValueError,
        r"^k must have a rank of 1 or more, got shape \(7, 0, 4",
    ),
    ("k with ranks last", only("k", lambda t: t.movedim(1, 3).contiguous().movedim(3, 1)), ValueError, of_slot("k")),
    ("v of other rows", only("v", lambda t: resized(t, 2, 1)), ValueError, r"^v must have shape \(.*, got \(7, 4, 7\)"),
    ("v transposed", only("v", transposed), ValueError, of_slot("v")),
    ("angle float16", only("angle", Tensor.half), TypeError, "^angle must be float32, got float16"),
    (
        "angle of other heads",
        only("angle", lambda t: t[:, :3]),
        ValueError,
        r"^angle must have shape \(.*, got \(7, 3, 3",
    ),
    *[
        (
            f"{n} angles",
            given(angle=torch.zeros(SLOTS, H, n)),
            ValueError,
            rf"^angle must have 1 to N // 2 = 4 angles per head, got {n}$",
        )
        for n in (0, 5, 8)
    ],
    *[
        (f"ssm {what}", only("ssm", change), error, message)
        for what, change, error, message in (
            ("missing", lambda s: None, TypeError, "^(ssm|state) must be a State or a tensor, got NoneType"),
            ("a list", lambda s: [s], TypeError, "^(ssm|state) must be a State or a tensor, got list"),
            ("float64", lambda s: s.data.double(), TypeError, "^(ssm|state) must be float32 or .*, got float64"),
            ("int8 without scales", lambda s: s.data.char(), ValueError, "^(ssm|state) of dtype int8 needs a scale"),
            ("of rank 3", lambda s: s.data[0], ValueError, r"^(ssm|state) must have shape \(slots, "),
            ("of snapshots", lambda s: State(s.data[None]), ValueError, r"^(ssm|state) must have data \(slots, "),
            ("strided", lambda s: strided(s.data), ValueError, "^(ssm|state) must be contiguous within a slot"),
            ("transposed", lambda s: transposed(s.data), ValueError, f"{of_slot('ssm')}.* only gated_delta_step takes"),
            ("a State, transposed", lambda s: State(transposed(s.data)), ValueError, of_slot("ssm")),
            ("elsewhere", on_meta, ValueError, "^k is on cpu, but the state is on meta"),
        )
    ],
]


@table(STATES)
def test_a_wrong_state_is_refused_by_name(change: Change, error: type[Exception], message: str) -> None:
    refuses_change(Mamba3State, state_arguments(), change, error, message)


@pytest.mark.parametrize("pairing", ["both", "", "Halved", 2, True, ["halved"]], ids=repr)
def test_a_pairing_that_there_is_not_is_refused(pairing: Any) -> None:
    with pytest.raises(ValueError, match=r"^pairing must be one of interleaved, halved, got "):
        Rotary(torch.zeros(1, 3), pairing=pairing)


def test_biases_are_given_by_their_names() -> None:
    with pytest.raises(TypeError, match="positional"):
        Rotary(torch.zeros(1, 3), torch.zeros(1, 4, 8))  # type: ignore[misc]


@pytest.mark.parametrize("form", TOKEN_AXES)
def test_the_call_that_refusals_start_from_is_right(form: str) -> None:
    arguments = arguments_of(form)
    state = arguments["state"]
    tensors = (state.ssm.data, state.k, state.v, state.angle, arguments["out"])
    before = [tensor.clone() for tensor in tensors]
    assert mamba3_step(**arguments) is arguments["out"]
    for tensor, old in zip(tensors, before, strict=True):
        assert not torch.equal(tensor, old)
        assert tensor.isfinite().all()

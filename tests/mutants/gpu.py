"""Mutants of what only a GPU shows: addresses past 32 bits, warps and kernels side by side, PTX, orders of sums."""

from mutants import Mutant

LAWS_OF_ORDER = "test_laws.py -k compiled_kernel and byte-ReplayCase and not tokens and not format"  # of one token
LARGE = "test_large.py::test_pools_and_activations_past_2_31_elements_work"
REAL = "Case(groups=1, rows=64, cols=128, bc='bfloat16', x='bfloat16', slots=9)"
REAL_REPLAY = "ReplayCase(rows=64, cols=128, bc='bfloat16', x='bfloat16', slots=9)"
PER_CHANNEL = "DeltaReplayCase(batch=2, heads=2, key_heads=2, rows=16, cols=64, per_channel=True, slots=9)"
EARLY = "test_early.py::test_starting_early_changes_no_byte"
EARLY_MAMBA2 = "Case(groups=1, rows=64, cols=128, bc=bfloat16, x=bfloat16, slots=8)"
EARLY_DELTA = "qk=bfloat16, gates=bfloat16, x=bfloat16, slots=8, format=bfloat16"
WAIT_IN = {  # the file of a kernel, and the layer of test_early.py that starts it
    "conv1d": EARLY_MAMBA2,
    "mamba2": EARLY_MAMBA2,
    "mamba2_at_once": "Case(batch=2, heads=2, groups=1, cols=32, exact=False, x=bfloat16, tokens=3, format=bfloat16)",
    "gated_delta": "DeltaCase(batch=2, heads=2, key_heads=1, cols=32, qk=bfloat16, gates=bfloat16, x=bfloat16, "
    "slots=8, tokens=3, format=bfloat16)",
    "gated_delta_at_once": "DeltaCase(batch=2, heads=2, key_heads=1, cols=32, qk=bfloat16, gates=bfloat16, "
    "exact=False, x=bfloat16, slots=8, tokens=3, format=bfloat16)",
    "gated_delta_one_token": f"DeltaCase(batch=1, heads=16, key_heads=16, rows=128, cols=128, {EARLY_DELTA})",
}
PARTED = f"DeltaReplayCase(heads=16, key_heads=8, rows=128, cols=128, {EARLY_DELTA}, form=parted)"
DIRECT, ACCURATE = "kernels: a call that repeats another", "kernels: output and state are as close"

# fmt: off
MUTANTS = (
    # addresses
    Mutant("tokens are found in 32 bits", "kernels/addressing.py",
           "b.to(tl.int64) * stride_b + t.to(tl.int64) * stride_t + h.to(tl.int64) * stride_h",
           "b * stride_b + t * stride_t + h * stride_h",
           f"{LARGE}[Case(heads=3, groups=1, rows=5, cols=20, slots=3)-1]", gpu=True),
    Mutant("slots are found in 32 bits", "kernels/slots.py",
           "return number.to(tl.int32).to(tl.int64)", "return number.to(tl.int32)",
           f"{LARGE}[Case(heads=2, groups=1, rows=5, cols=20, x=float16, index=int64, slots=3)-0]", gpu=True),
    # kernels side by side
    *(Mutant(f"{kernel} does not wait for the kernel in front of it", f"kernels/{kernel}.py",
             "        gdc_wait()\n", "        pass\n", f"{EARLY}[{layer}]", gpu=True)
      for kernel, layer in WAIT_IN.items()),
    Mutant("gated_delta_replay does not wait for the kernel in front of it", "kernels/gated_delta_replay.py",
           "if WAITS:", "if False:", f"{EARLY}[{PARTED}]", gpu=True),
    Mutant("repeated calls start on the stream of a thread that has no other", "launch/driver.py",
           "torch._C._cuda_getCurrentRawStream(self._device_index)", "0",
           f"kernels: a CUDA graph draws fresh random bits | {REAL[:-1]}, rounding='stochastic', format='float16')",
           gpu=True),
    # warps side by side
    Mutant("a program is one warp in calls that repeat another", "launch/driver.py",
           "32 * metadata.num_warps", "32", f"{DIRECT} | {REAL_REPLAY}", gpu=True),
    Mutant("a program has no shared memory in calls that repeat another", "launch/driver.py",
           "metadata.num_warps, metadata.shared)", "metadata.num_warps, 0)", f"{DIRECT} | {REAL_REPLAY}", gpu=True),
    # orders of sums that the compiler's layouts decide
    Mutant("many threads of a row of the window sum in the order of a layout", "kernels/replay_token.py",
           "sums.shape[1] > BESIDE_EACH_OTHER or FORM.THREADS", "FORM.THREADS", LAWS_OF_ORDER, gpu=True),
    Mutant("one warp sums the window in the order of a layout", "kernels/replay_token.py",
           " or FORM.THREADS <= ONE_WARP", "", LAWS_OF_ORDER, gpu=True),
    # PTX and tensor cores, which the interpreter does not have
    Mutant("neighbours of bfloat16 change places", "kernels/ptx.py",
           '"shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;"', '"shl.b32 $1, $2, 16; and.b32 $0, $2, 0xFFFF0000;"',
           f"{ACCURATE} | {REAL[:-1]}, format='bfloat16', tokens=2)", gpu=True),
    Mutant("exponentials are powers of two", "kernels/ptx.py",
           '"mul.ftz.f32 e, $1, 0f3FB8AA3B;"', '"mov.f32 e, $1;"', f"{ACCURATE} | {PER_CHANNEL}", gpu=True),
    Mutant("quotients are not corrected", "kernels/ptx.py",
           '    "fma.rn.f32 $0, e, q, $1;",\n    "fma.rn.f32 q, $0, r, q;",\n    "fma.rn.f32 $0, e, q, $1;",\n'
           '    "fma.rn.f32 $0, $0, r, q;",\n', '    "mov.f32 $0, q;",\n',
           "test_scaled_formats.py -k scales_are_divided_as_correctly", gpu=True),
    Mutant("a fold into float32 leaves out the smallest of its products of terms", "kernels/tensor_cores.py",
           "for order in tl.static_range(2, -1, -1):", "for order in tl.static_range(1, -1, -1):",
           f"{ACCURATE} | {REAL_REPLAY[:-1]}, tokens=4, window=8)", gpu=True),
    # the host
    Mutant("the host waits for numbers of slots", "ops/numbers.py",
           "host.pin_memory().to(device, non_blocking=True)", "host.to(device)",
           "test_pool.py -k nothing_waits_for_the_device and mamba3", gpu=True),
    Mutant("a repeated call waits for its kernel", "launch/driver.py",
           "            error = self._launch(*self._launched)\n            if error == NO_CONTEXT",
           "            error = self._launch(*self._launched)\n            torch.cuda.current_stream().synchronize()\n"
           "            if error == NO_CONTEXT",
           "test_torch_compile.py -k a_call_with_out_neither_allocates_nor_synchronises and mamba2", gpu=True),
    Mutant("a layer copies its tokens on their way", "integrations/transformers/mixers/mamba2.py",
           "x, B, C = xBC.split(", "x, B, C = xBC.clone().split(",
           "test_transformers_gpu.py -k few_kernels", gpu=True),
)

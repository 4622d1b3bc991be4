"""Mutants of formats: scales, saturation, NaN, and the edges of what is stored."""

from mutants import Mutant

EXACT = "test_scaled_formats.py::test_encode_agrees_with_exact_fractions"
LIKELY = "test_formats.py::test_rounding_up_is_as_likely_as_the_discarded_fraction_and_makes_neither_inf_nor_nan"

# fmt: off
MUTANTS = (
    Mutant("the largest float32 has a scale that decodes to infinity", "state/formats.py",
           "(torch.ones_like(e) / e).clamp(max=fmt.largest_scale)", "torch.ones_like(e) / e",
           f"{EXACT}[nearest-torch.int16]"),
    Mutant("the largest scale is rounded up", "state/formats.py",
           "scale if scale.double() <= exact else scale.nextafter(torch.zeros_like(scale))",
           "scale if scale.double() >= exact else scale.nextafter(torch.full_like(scale, torch.inf))",
           f"{EXACT}[nearest-torch.int16]"),
    Mutant("a row with an infinity is a row of zeros", "state/formats.py",
           "torch.where(amax.isfinite(), 1.0, torch.nan))", "torch.ones_like(e))",
           f"{EXACT}[nearest-torch.int8]"),
    Mutant("a row of 2^-100 is a row of zeros", "state/formats.py",
           "(amax >= SMALLEST_AMAX)", "(amax > SMALLEST_AMAX)", f"{EXACT}[nearest-torch.int8]"),
    Mutant("float8 rounds the exact product", "state/formats.py",
           "product if fmt.whole else product.float()", "product if fmt.whole else product.float().nextafter("
           "torch.zeros_like(product.float()))", f"{EXACT}[nearest-torch.float8_e4m3fn]"),
    Mutant("int16 rounds up with every random number", "state/rounding.py",
           "(random | 1) >> 16", "(random | 0x8000) >> 16", f"{EXACT}[stochastic-torch.int16]"),
    Mutant("int16 is never a whole number again", "state/rounding.py",
           "(random | 1) >> 16", "random >> 16", f"{EXACT}[stochastic-torch.int16]"),
    Mutant("int8 rounds fractions down before it draws", "state/rounding.py",
           "(w * 32768.0).round()", "(w * 32768.0).floor()", f"{EXACT}[stochastic-torch.int8]"),
    Mutant("subnormals of float8 begin one binade lower", "state/rounding.py",
           "magnitude < 2.0**-6 ", "magnitude < 2.0**-7 ", f"{EXACT}[stochastic-torch.float8_e4m3fn]"),
    Mutant("float8 loses signs", "state/rounding.py",
           "(code | bits >> 24 & 0x80)", "code", f"{EXACT}[stochastic-torch.float8_e4m3fn]"),
    Mutant("float16 rounds past the largest value", "state/rounding.py",
           "magnitude > 65504.0", "magnitude > 65536.0", f"{LIKELY}[torch.float16]"),
    Mutant("an infinity becomes the largest float16", "state/rounding.py",
           "magnitude >= 65536.0", "magnitude > torch.inf", f"{LIKELY}[torch.float16]"),
    Mutant("a NaN becomes an infinity of float16", "state/rounding.py",
           "torch.where(v.isnan(), 0x7E00, code)", "torch.where(v.isnan(), 0x7C00, code)", f"{LIKELY}[torch.float16]"),
    Mutant("a NaN of bfloat16 may become an infinity", "state/rounding.py",
           "torch.where(v.isnan(), 0x7FC0, bits + random >> 16)", "bits + random >> 16", f"{LIKELY}[torch.bfloat16]"),
    Mutant("subnormals of float16 draw half of their bits", "state/rounding.py",
           "code = torch.where(subnormal, fixed_point.long() + random >> 16, code)\n    code = torch.where(magnitude",
           "code = torch.where(subnormal, fixed_point.long() + (random >> 1) >> 16, code)\n"
           "    code = torch.where(magnitude", f"{LIKELY}[torch.float16]"),
    Mutant("columns of 8 bits share no bytes", "state/rounding.py",
           "apart = 8 if dtype.itemsize == 1 else 16", "apart = 16",
           "test_formats.py::test_a_column_finds_its_two_bytes_of_its_word[torch.int8]"),
    Mutant("Philox mixes in the wrong word of its key", "state/rounding.py",
           "(low >> 32) & WORD ^ w3 ^ k1", "(low >> 32) & WORD ^ w3 ^ k0",
           "test_formats.py::test_philox_gives_the_published_words"),
)

"""Prints what the installed Transformers adds to the fingerprints that flashstate knows: nothing in a known version.

Read how the forwards of the printed classes changed before the fingerprints go to KNOWN.
"""

from __future__ import annotations

from torch import nn
from transformers import CONFIG_MAPPING

from flashstate.integrations.transformers.families import KNOWN, fingerprint, is_mixer, parts
from flashstate.integrations.transformers.tiny import FAMILIES, tiny_model


def classes() -> dict[str, type[nn.Module]]:
    """The mixers of all families in the installed version, and the modules in them, by their names."""
    models = [tiny_model(family) for family in FAMILIES if family in CONFIG_MAPPING]
    models.append(tiny_model("falcon_h1", mamba_rms_norm=True))
    mixers = (module for model in models for module in model.modules() if is_mixer(module))
    return {cls.__name__: cls for mixer in mixers for cls in parts(mixer)}


if __name__ == "__main__":
    for name, cls in classes().items():
        if fingerprint(cls) not in KNOWN.get(name, ()):
            print(f"{name}: {fingerprint(cls)}")

"""Models of Transformers that decode on flashstate."""

from flashstate.integrations.transformers.families import check_version

check_version()

from flashstate.integrations.transformers.cache import StateCache  # noqa: E402
from flashstate.integrations.transformers.enabling import disable, enable  # noqa: E402

__all__ = ["StateCache", "disable", "enable"]

"""From an HF config to the family that describes the model."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from dapo_megatron.models.deepseek_v3 import DEEPSEEK_V3
from dapo_megatron.models.family import Family
from dapo_megatron.models.llama import LLAMA
from dapo_megatron.models.mistral import MISTRAL, MIXTRAL
from dapo_megatron.models.qwen2 import QWEN2
from dapo_megatron.models.qwen3 import QWEN3, QWEN3_MOE

FAMILIES = (QWEN2, QWEN3, QWEN3_MOE, LLAMA, MISTRAL, MIXTRAL, DEEPSEEK_V3)


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """The family of a model, by `architectures[0]` of its config.json.

    Raises:
        ValueError: no or an unknown architecture; lists the known ones.
    """
    known = {name: family for family in FAMILIES for name in family.architectures}
    names = hf_config.get("architectures") or []
    if names and names[0] in known:
        return known[names[0]]
    given = f"architecture {names[0]!r} is unknown" if names else "the HF config names no architecture"
    nearest = difflib.get_close_matches(names[0], known, n=1) if names else []
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    raise ValueError(f"{given}: known are {', '.join(sorted(known))}{hint}")

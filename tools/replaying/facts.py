"""What a replay knows of its target, and the ways to name one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Facts:
    """From the target's model card. `speaks` says what bodies may carry: ours, vllm, or plain OpenAI fields.

    0 and empty where the card doesn't tell. `server` is what our server's /version says: build, configuration hash.
    """

    model: str
    speaks: str = "plain"
    vocab_size: int = 0
    special_ids: tuple[int, ...] = ()
    loops: int = 0
    exit_rule: str = ""
    context_tokens: int = 0
    server: dict[str, Any] = field(default_factory=dict)

    @property
    def takes_ids_back(self) -> bool:
        """Whether answers tell token ids."""
        return self.speaks in ("epicycle", "vllm")


def facts_of(card: dict[str, Any], speaks: str = "auto", server: dict[str, Any] | None = None) -> Facts:
    """`speaks` other than "auto" wins over what the card lets guess."""
    guess = "epicycle" if "exit_rule" in card else "vllm" if card.get("owned_by") == "vllm" else "plain"
    return Facts(
        model=str(card.get("id", "")),
        speaks=guess if speaks == "auto" else speaks,
        vocab_size=int(card.get("vocab_size") or 0),
        special_ids=tuple(card.get("eos_token_ids") or ()),
        loops=int(card.get("loops") or 0),
        exit_rule=str(card.get("exit_rule") or ""),
        context_tokens=int(card.get("max_model_len") or card.get("context_length") or 0),
        server=server or {},
    )

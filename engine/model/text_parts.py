"""Language part of a larger model: its tensors' names, and its class.

transformers makes most language parts as causal language models of other families. For some language parts it
has only the stack of layers. What the larger model puts on top of that for text is one product, so only that
product is added here. :data:`engine.model.model_sources.PLAIN_HEADS` names the types of which this is known.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import torch
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import WeightConverter
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from engine.model.model_sources import PLAIN_HEADS

NAMES = {
    r"^model\.language_model\.": "model.",
    r"^model\.text_model\.": "model.",
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}
"""Names in a checkpoint with other modalities -> names in its language model alone."""

OTHER_MODALITIES = re.compile(
    r"vision|visual|image|audio|multi_modal|multimodal|mm_projector|embed_vision|^patch_merge"
    r"|^model\.connector\."
)
"""Names of tensors that only other modalities need."""


def read_as_whole(model_class: Any, text_type: str, whole_type: str) -> None:
    """Give a language part the tensor layout of the larger model, if it has none.

    The layout's names from their beginning on are of the larger model: :data:`NAMES` has those.
    """
    if any(get_checkpoint_conversion_mapping(name) for name in (model_class.__name__, text_type)):
        return
    layout = get_checkpoint_conversion_mapping(whole_type) or ()
    own = [each for each in layout if not any(name.startswith("^") for name in each.source_patterns)]
    if own:
        register_checkpoint_conversion_mapping(model_class.__name__, own)


def class_with_head(text_config: Any, whole_type: str) -> Any | None:
    """Causal language model of a bare stack of layers; None without a known one.

    ``whole_type`` is the model type of the larger model, in whose layout the weights are stored.
    """
    if text_config.model_type not in PLAIN_HEADS:
        return None
    config_class: Any = type(text_config)
    return _class_with_head(MODEL_MAPPING[config_class], config_class, whole_type)


@cache
def _class_with_head(stack_class: Any, config_class: Any, whole_type: str) -> Any:
    base = stack_class.__mro__[1]

    def initialise(self: Any, config: Any) -> None:
        base.__init__(self, config)
        self.model = stack_class(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self: Any,
        input_ids: torch.Tensor | None = None,
        *,
        inputs_embeds: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **arguments: Any,
    ) -> CausalLMOutputWithPast:
        """Tokens [1, n] to logits [1, wanted, vocabulary], like those of transformers."""
        hidden = self.model(input_ids=input_ids, inputs_embeds=inputs_embeds, **arguments)[0]
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutputWithPast(logits=self.lm_head(hidden[:, kept, :]))

    name = f"{stack_class.__name__.removesuffix('Model')}ForCausalLM"
    model_class = type(
        name,
        (base,),
        {
            "__init__": initialise,
            "__module__": stack_class.__module__,
            "forward": forward,
            "config_class": config_class,
            "base_model_prefix": "model",
            "_tied_weights_keys": {"lm_head.weight": "model.embed_tokens.weight"},
            "_tp_plan": {"lm_head": "colwise_gather_output"},
        },
    )
    layout = get_checkpoint_conversion_mapping(whole_type) or ()
    converters = [each for each in layout if isinstance(each, WeightConverter)]
    register_checkpoint_conversion_mapping(name, converters, overwrite=True)
    return model_class

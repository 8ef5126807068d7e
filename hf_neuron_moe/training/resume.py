"""Resuming mixture-of-experts models with the stock Trainer.

``Trainer.train(resume_from_checkpoint=...)`` of transformers 5 loads checkpoints under their on-disk names into a model
whose in-memory names differ, so experts and router silently keep their present values. ``patch_model`` installs the
remedy; these functions do the same for models that are not patched, or not yet.
"""

from __future__ import annotations

from torch import nn

from hf_neuron_moe.patching import checkpoint_names


def enable_moe_resume(model: nn.Module) -> None:
    """Make ``model.load_state_dict`` read the model's checkpoint files, so that the Trainer resumes from them.

    Keys under in-memory names load as before. Calling it again changes nothing.

    Args:
        model: a transformers model, or a module that contains some.
    """
    checkpoint_names.install(checkpoint_names.unhooked_models(model))


def disable_moe_resume(model: nn.Module) -> None:
    """Undo :func:`enable_moe_resume`.

    Args:
        model: the model given to it; one without the remedy is left as it is.
    """
    checkpoint_names.remove(checkpoint_names.hooked_models(model))

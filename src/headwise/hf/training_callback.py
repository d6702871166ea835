"""Heads as they form, in transformers' own training loop."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class WatchCallback(TrainerCallback):
    """Lets a `headwise.look.Watch` measure in a `Trainer`: ``Trainer(..., callbacks=[WatchCallback(watch)])``.

    It measures before the first update, after updates when the watch says so, and at the end; what the trainer logged
    last (loss and the like) goes beside the scores. Of several processes the first measures.

    Args:
        watch: made with the model that trains.

    Raises:
        TypeError: no watch.

    Example:
        >>> import headwise.hf
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     hidden_size=24, num_attention_heads=4, num_hidden_layers=1, intermediate_size=32, vocab_size=97
        ... )
        >>> model = LlamaForCausalLM(config)
        >>> callback = headwise.hf.WatchCallback(headwise.look.Watch(model, [1, 2, 3, 5, 8, 13, 21, 34]))
    """

    def __init__(self, watch: Any) -> None:
        if not all(callable(getattr(watch, name, None)) for name in ("step", "measure", "close")):
            raise TypeError(f"a callback takes a headwise.look.Watch; got {type(watch).__name__}")
        self.watch = watch
        self.numbers: dict[str, float] = {}

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The model as the updates so far left it: at their end the trainer has not logged their loss yet."""
        if state.is_world_process_zero:
            self.watch.step(state.global_step, **self.numbers)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Loss and learning rate, as the trainer logs them."""
        kept = ("loss", "eval_loss", "learning_rate")
        numbers = {} if logs is None else logs
        self.numbers |= {name: numbers[name] for name in kept if isinstance(numbers.get(name), (int, float))}

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The model as it is at the end."""
        if state.is_world_process_zero:
            points = self.watch.curve.points
            if not points or points[-1].step != state.global_step:
                self.watch.measure(state.global_step, **self.numbers)
            self.watch.close()

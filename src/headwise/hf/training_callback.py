"""A callback that measures the heads of a model during training with transformers' `Trainer`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class WatchCallback(TrainerCallback):
    """A callback that runs a `headwise.look.Watch` in a `Trainer`: ``Trainer(..., callbacks=[WatchCallback(watch)])``.

    It measures before the first update, after the updates that the watch selects, and at the end of training. The
    losses and the learning rate that the trainer logged last are stored with the scores. If several processes train,
    only the world's process zero measures.

    Args:
        watch: A watch that was created with the model to train.

    Raises:
        TypeError: `watch` is not a `headwise.look.Watch`.

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
        """Measure the model after the updates so far. At the end of a step, its loss would not be logged yet."""
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
        """Store the losses and the learning rate that the trainer logs."""
        kept = ("loss", "eval_loss", "learning_rate")
        numbers = {} if logs is None else logs
        self.numbers |= {name: numbers[name] for name in kept if isinstance(numbers.get(name), (int, float))}

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measure the model at the end of training, unless the last step is already measured, and close the watch."""
        if state.is_world_process_zero:
            points = self.watch.curve.points
            if not points or points[-1].step != state.global_step:
                self.watch.measure(state.global_step, **self.numbers)
            self.watch.close()

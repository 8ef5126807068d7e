"""Data of every kind, in files of every kind; and options of runs on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets

QUESTIONS = [f"What is {number} plus {number}?" for number in range(8)]
ANSWERS = [f"It is {2 * number}." for number in range(8)]
CHATS = [
    [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    for question, answer in zip(QUESTIONS, ANSWERS)
]
ROWS: dict[str, list[dict[str, Any]]] = {
    "messages": [{"messages": chat, "year": 1} for chat in CHATS],
    "conversations": [
        {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}
        for question, answer in zip(QUESTIONS, ANSWERS)
    ],
    "alpaca": [
        {"instruction": "Add", "input": question, "output": answer} for question, answer in zip(QUESTIONS, ANSWERS)
    ],
    "completion": [{"prompt": question, "completion": answer} for question, answer in zip(QUESTIONS, ANSWERS)],
    "text": [{"text": f"{question} {answer}"} for question, answer in zip(QUESTIONS, ANSWERS)],
    "preference": [
        {"prompt": chat[:1], "chosen": chat[1:], "rejected": [{"role": "assistant", "content": "No idea."}]}
        for chat in CHATS
    ],
}


def write(folder: Path, rows: list[dict[str, Any]], suffix: str = ".jsonl") -> Path:
    """Write rows into a file of a kind."""
    file = folder / f"rows{suffix}"
    if suffix == ".txt":
        file.write_text("\n".join(str(row["text"]) for row in rows), encoding="utf-8")
    elif suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif suffix == ".json":
        file.write_text(json.dumps(rows), encoding="utf-8")
    else:
        getattr(datasets.Dataset.from_list(rows), f"to_{suffix.removeprefix('.')}")(file)
    return file


def words(model: Path, data: Path, out: Path, **keys: Any) -> list[str]:
    """Return the command line of a short run."""
    given = {
        "model": model,
        "train_files": data,
        "output_dir": out,
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "learning_rate": "1e-2",
        "logging_steps": 1,
        "neuron_precision": "fp32",
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        **keys,
    }
    return [
        word
        for key, value in given.items()
        for word in (f"--{key}", *(map(str, value) if isinstance(value, list) else [str(value)]))
    ]


def losses(out: Path) -> list[float]:
    """Losses of all logged steps of a run."""
    history = json.loads((out / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]

"""nanoGPT's loop on the record's text."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

import torch  # noqa: E402
from benchmarks.trainers.clock import Clock  # noqa: E402
from benchmarks.trainers.plain_network import Network  # noqa: E402
from benchmarks.trainers.quality_task import QualityTask  # noqa: E402

task = QualityTask.given()
setting, clock = task.setting, Clock(task.result)
torch.manual_seed(task.seed)
sizes = (setting["dim"], setting["layers"], setting["heads"], task.vocabulary, setting["length"])
network = Network(*sizes, setting.get("dropout", 0.0), setting.get("bias", True)).to(task.device)
groups = [
    {"params": [p for p in network.parameters() if p.dim() > 1], "weight_decay": setting["weight_decay"]},
    {"params": [p for p in network.parameters() if p.dim() < 2], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=setting["lr"], betas=(0.9, setting["beta2"]), fused=True)
called = torch.compile(network) if setting["compile"] else network
casting = torch.autocast(task.device, dtype=torch.bfloat16, enabled=setting["format"] == "bf16")


def there(windows):
    windows = torch.from_numpy(windows)
    return windows.pin_memory().to(task.device, non_blocking=True) if task.device == "cuda" else windows


for step in range(task.steps):
    for group in optimizer.param_groups:
        group["lr"] = task.rate(step)
    for micro in range(setting["accumulation"]):
        window = there(task.batch(step * setting["accumulation"] + micro))
        with casting:
            loss = called(window[:, :-1], window[:, 1:]) / setting["accumulation"]
        loss.backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    task.stamp(clock, step + 1)
network.eval()
with torch.no_grad(), casting:
    windows = [there(window) for window in task.validation()]
    task.report(clock, [(float(network(window[:, :-1], window[:, 1:])), len(window)) for window in windows])
task.end()

#!/usr/bin/env python3
"""Every technique on all the GPUs of a host, in one table and one picture.

    tests/scaling/scaling.py --gpus 4 --out /tmp/scaling                  the 1.7B shape, on GPUs
    tests/scaling/scaling.py --gpus 2 --tiny --out /tmp/scaling           two ranks, on the CPU

Each GPU gets the same work whatever their number: 8 sequences a step. For every number of GPUs there
is one reference, the same global batch on one GPU, whose losses the ten steps of each technique must
repeat. Writes scaling.csv, scaling.md and scaling.svg. Rows of other numbers of GPUs that are already
in scaling.csv stay, so that --counts 2 and later --counts 4 make one table. Needs nothing but Python's
own library.
"""
import argparse
import csv
import json
import os
import re
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

# name, program, flags for n GPUs, numbers of GPUs for which it makes sense. One line a technique:
# context and expert parallelism join here.
TECHNIQUES = [
    ("DP", "02_data_parallel/train", lambda n: [], lambda n: True),
    ("ZeRO-1", "03_zero/train", lambda n: ["--stage", "1", "--gather", "optimizer"], lambda n: True),
    ("ZeRO-2", "03_zero/train", lambda n: ["--stage", "2", "--gather", "optimizer"], lambda n: True),
    ("ZeRO-3", "03_zero/train", lambda n: ["--stage", "3"], lambda n: True),
    ("TP + SP", "04_tensor_parallel/train",
     lambda n: ["--tp", str(n), "--sequence-parallel", "--overlap", "1"], lambda n: True),
    ("TP2 + SP x DP", "04_tensor_parallel/train",
     lambda n: ["--tp", "2", "--sequence-parallel", "--overlap", "1"], lambda n: n > 2),
    ("PP 1F1B", "06_pipeline_parallel/train", lambda n: pipeline(n, "1f1b"), lambda n: True),
    ("PP interleaved", "06_pipeline_parallel/train", lambda n: pipeline(n, "interleaved"),
     lambda n: True),
    ("PP ZB-H2", "06_pipeline_parallel/train", lambda n: pipeline(n, "zb-h2"), lambda n: True),
]
COLUMNS = ["technique", "GPUs", "tokens/s per GPU", "MFU %", "exposed ms/step", "peak GiB",
           "states predicted GiB", "states measured GiB", "largest loss difference"]


def pipeline(n, schedule):  # smaller micro-batches: a pipeline needs several in flight
    return ["--pp", str(n), "--schedule", schedule, "--micro-batch", "2" if not a.tiny else "1"]


def run(program, flags, ranks, log):
    """Starts a training program and returns what it printed; its steps are in `log`."""
    command = [f"{a.build}/{program}"] + flags
    if ranks > 1 and not a.tiny:
        command = [f"{ROOT}/lockstep", "mpirun", "-n", str(ranks)] + command
    elif ranks > 1:
        command += ["--ranks", str(ranks)]
    env = dict(os.environ, LOCKSTEP_NO_INSTALL="1", LOCKSTEP_PROGRAMS=a.build)
    done = subprocess.run(command + ["--log", log], capture_output=True, text=True, env=env,
                          timeout=a.limit)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()[-300:]}")
    return done.stdout


def common(gpus):
    sequence = 64 if a.tiny else 2048
    flags = ["--sequence", str(sequence), "--micro-batch", "2" if a.tiny else "8",
             "--batch-tokens", str(gpus * (4 if a.tiny else 8) * sequence), "--steps", str(a.steps),
             "--evaluate-every", "0", "--evaluation-batches", "1", "--sample", "0",
             "--learning-rate", "1e-4", "--warmup", "5"]
    if a.tiny:
        flags += ["--layers", "16", "--heads", "8"]
    return flags + ([] if a.tiny else ["--model", "1.7B", "--device", "cuda"])


def merged(flags, more):
    """A flag in `more` takes the place of one with its name, and with a value, in `flags`."""
    for name in (word for word in more if word.startswith("--") and word in flags):
        at = flags.index(name)
        flags = flags[:at] + flags[at + 2:]
    return flags + more


def losses(log):
    with open(log) as lines:
        steps = [json.loads(line) for line in lines]
    return [s["loss"] for s in steps if "loss" in s], steps


def row(name, gpus, text, log, reference):
    mine, steps = losses(log)
    last = [s for s in steps if "loss" in s][-1]
    exposed = re.search(r"^exposed ([\d.]+) to ([\d.]+) ms", text, re.MULTILINE)
    planned = re.search(r"weights ([\d.]+) MiB, gradients ([\d.]+), master weights ([\d.]+), "
                        r"moments ([\d.]+)", text)
    apart = max((abs(x - y) / abs(y) for x, y in zip(mine, reference)), default=0)
    return [name, gpus, round(last["tokens_per_second"] / gpus),
            round(100 * last["mfu"], 1) if last["mfu"] else "",
            f"{exposed.group(1)} to {exposed.group(2)}" if exposed else "",
            round(last["memory_peak_bytes"] / 2**30, 2),
            round(sum(map(float, planned.groups())) / 2**10, 2),
            round(last["memory_bytes"] / 2**30, 2), f"{apart:.1e}"]


def earlier(counts):
    if not os.path.exists(f"{a.out}/scaling.csv"):
        return []
    with open(f"{a.out}/scaling.csv", newline="") as table:
        rows = [[row[0], int(row[1])] + row[2:] for row in list(csv.reader(table))[1:]]
    rows = [row for row in rows if row[1] not in counts and row[2] != "failed"]
    return [row[:2] + [int(row[2])] + row[3:] for row in rows]


def measure():
    counts = [n for n in map(int, a.counts.split(",")) if n <= a.gpus]
    rows = earlier(counts)
    for n in counts:
        log = f"{a.out}/one_{n}.jsonl"
        text = run("01_single_gpu/train", common(n), 1, log)
        reference, _ = losses(log)
        if n == 1:
            rows.append(row("one GPU", 1, text, log, reference))
        for name, program, flags, fits in TECHNIQUES:
            if n == 1 or not fits(n) or (a.only and not re.search(a.only, name)):
                continue
            log = f"{a.out}/{re.sub('[^A-Za-z0-9]+', '_', name)}_{n}.jsonl"
            try:
                text = run(program, merged(common(n), flags(n)), n, log)
                rows.append(row(name, n, text, log, reference))
            except (RuntimeError, subprocess.TimeoutExpired) as problem:
                print(f"{name} on {n}: {problem}", file=sys.stderr)
                rows.append([name, n] + ["failed"] + [""] * (len(COLUMNS) - 3))
            print(*rows[-1], sep="  ", flush=True)
            save(rows)
    return rows


def save(rows):
    rows = sorted(rows, key=lambda row: row[1])
    with open(f"{a.out}/scaling.csv", "w", newline="") as out:
        csv.writer(out, lineterminator="\n").writerows([COLUMNS] + rows)
    with open(f"{a.out}/scaling.md", "w") as out:
        for line in [COLUMNS, ["---"] * len(COLUMNS)] + rows:
            out.write("| " + " | ".join(map(str, line)) + " |\n")
    draw(rows)


def draw(rows):
    """Tokens per second and GPU over the number of GPUs, a line for each technique."""
    one = [r[2] for r in rows if r[0] == "one GPU"]
    curves = {}
    for r in rows:
        if r[0] != "one GPU" and r[2] != "failed":
            curves.setdefault(r[0], []).append((r[1], r[2]))
    if not one or not curves:
        return
    left, top, width, height = 70, 30, 480, 300
    most = 1.05 * max(one + [y for line in curves.values() for _, y in line])
    counts = sorted({1} | {x for line in curves.values() for x, _ in line})
    x_of = {n: left + width * i / max(1, len(counts) - 1) for i, n in enumerate(counts)}
    y_of = lambda value: top + height * (1 - value / most)
    colours = ["#1b6ca8", "#c1440e", "#2f7d32", "#7b3fa0", "#b8860b", "#00838f", "#ad1457", "#555",
               "#8d6e63"]
    svg = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 160} '
           f'{top + height + 50}" font-family="sans-serif" font-size="12">',
           '<rect width="100%" height="100%" fill="white"/>',
           f'<text x="{left}" y="18">tokens/s per GPU over GPUs, same work on each</text>']
    for n in counts:
        svg.append(f'<text x="{x_of[n]:.0f}" y="{top + height + 20}" text-anchor="middle">{n}</text>')
    for part in range(5):
        value = most * part / 4
        svg.append(f'<path d="M{left} {y_of(value):.0f}h{width}" stroke="#ddd"/>'
                   f'<text x="{left - 6}" y="{y_of(value) + 4:.0f}" text-anchor="end">{value:.0f}</text>')
    for (name, line), colour in zip(curves.items(), colours * 3):
        points = [(1, one[0])] + sorted(line)
        path = " ".join(f"{x_of[x]:.0f},{y_of(y):.1f}" for x, y in points)
        number = list(curves).index(name)
        svg.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
                   f'<text x="{left + width + 12}" y="{top + 14 + 18 * number}" fill="{colour}">'
                   f'{name}</text>')
    with open(f"{a.out}/scaling.svg", "w") as out:
        out.write("\n".join(svg + ["</svg>"]) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=2, help="1, 2, 4 or 8: the most that are used")
    parser.add_argument("--counts", default="1,2,4,8", help="numbers of GPUs to measure")
    parser.add_argument("--out", required=True, help="folder for the tables")
    parser.add_argument("--build", default=f"{ROOT}/build", help="folder with the programs")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", default="", help="techniques whose name matches this")
    parser.add_argument("--limit", type=int, default=60, help="seconds that a run may take")
    parser.add_argument("--tiny", action="store_true", help="the tiny model, ranks as threads")
    a = parser.parse_args()
    missing = [p for _, p, _, _ in TECHNIQUES if not os.path.exists(f"{a.build}/{p}")]
    if a.gpus < 1:
        sys.exit(f"--gpus {a.gpus}: at least 1")
    if missing:
        sys.exit(f"{a.build} has no {missing[0]}: build first, or name the folder with --build")
    os.makedirs(a.out, exist_ok=True)
    rows = measure()
    save(rows)
    sys.exit(any(r[2] == "failed" for r in rows))

#!/usr/bin/env python3
"""Every technique on all the GPUs of a host, in one table and one picture.

    tests/scaling/scaling.py --gpus 4 --out /tmp/scaling                  the 1.7B shape, on GPUs
    tests/scaling/scaling.py --gpus 2 --tiny --out /tmp/scaling           two ranks, on the CPU

Each GPU gets the same work whatever their number: 8 sequences a step. For every number of GPUs there
is one reference, the same global batch on one GPU, whose losses the ten steps of each technique must
repeat. Writes scaling.csv, scaling.md and scaling.svg. Rows that are already in scaling.csv stay until
they are measured again, so that --counts 2 and later --counts 4 make one table. Exposed: on the rank
that waits least for the others, and on the one that waits most. Needs nothing but Python's own library.
"""
import argparse
import contextlib
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


def run(program, flags, ranks, log, limit=None):
    """Starts a training program and returns what it printed; its steps are in `log`."""
    command = [f"{a.build}/{program}"] + flags
    if ranks > 1 and not a.tiny:
        command = [f"{ROOT}/lockstep", "mpirun", "-n", str(ranks)] + command
    elif ranks > 1:
        command += ["--ranks", str(ranks)]
    env = dict(os.environ, LOCKSTEP_NO_INSTALL="1", LOCKSTEP_PROGRAMS=a.build)
    done = subprocess.run(command + ["--log", log], capture_output=True, text=True, env=env,
                          timeout=limit or a.limit)
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


def earlier():
    """The rows of a scaling.csv that is already there."""
    if not os.path.exists(f"{a.out}/scaling.csv"):
        return []
    with open(f"{a.out}/scaling.csv", newline="") as table:
        header, *rows = list(csv.reader(table)) or [[]]
    if header != COLUMNS:
        sys.exit(f"{a.out}/scaling.csv is another table: its first line is not {','.join(COLUMNS)}")
    return [[row[0], int(row[1]), row[2] if row[2] == "failed" else int(row[2])] + row[3:]
            for row in rows]


def attempt(name, gpus, work):
    """The row that `work` measures, or one that says that it failed."""
    try:
        return work()
    except (RuntimeError, subprocess.TimeoutExpired) as problem:
        print(f"{name} on {gpus}: {problem}", file=sys.stderr)
        return [name, gpus] + ["failed"] + [""] * (len(COLUMNS) - 3)


def measure(old):
    rows = []

    def add(row):
        rows.append(row)
        print(*row, sep="  ", flush=True)
        done = {tuple(r[:2]) for r in rows}
        save([r for r in old if tuple(r[:2]) not in done] + rows)

    for n in a.counts:
        log = f"{a.out}/one_{n}.jsonl"
        reference = []

        def one():
            text = run("01_single_gpu/train", common(n), 1, log, limit=n * a.limit)
            reference.extend(losses(log)[0])
            return row("one GPU", 1, text, log, reference)

        alone = attempt("one GPU", 1, one)
        if n == 1:
            add(alone)
        for name, program, flags, fits in TECHNIQUES:
            if n == 1 or not fits(n) or not a.only.search(name):
                continue
            mine = f"{a.out}/{re.sub('[^A-Za-z0-9]+', '_', name)}_{n}.jsonl"

            def technique():
                if not reference:
                    raise RuntimeError("not run, because its reference on one GPU failed")
                text = run(program, merged(common(n), flags(n)), n, mine)
                return row(name, n, text, mine, reference)

            add(attempt(name, n, technique))
    return rows


def save(rows):
    rows = sorted(rows, key=lambda row: row[1])
    with replaced(f"{a.out}/scaling.csv") as out:
        csv.writer(out, lineterminator="\n").writerows([COLUMNS] + rows)
    with replaced(f"{a.out}/scaling.md") as out:
        for line in [COLUMNS, ["---"] * len(COLUMNS)] + rows:
            out.write("| " + " | ".join(map(str, line)) + " |\n")
    draw(rows)


@contextlib.contextmanager
def replaced(path):
    """A file that takes the place of the old one when it is complete."""
    with open(path + ".new", "w", newline="") as out:
        yield out
    os.replace(path + ".new", path)


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
    with replaced(f"{a.out}/scaling.svg") as out:
        out.write("\n".join(svg + ["</svg>"]) + "\n")


def read_flags():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])

    def whole(least):
        def read(word):
            if not word.isdigit() or int(word) < least:
                raise argparse.ArgumentTypeError(f"{word!r}: a whole number from {least} on")
            return int(word)
        return read

    def numbers(word):
        return [whole(1)(part) for part in word.split(",")]

    def expression(word):
        try:
            return re.compile(word)
        except re.error as problem:
            raise argparse.ArgumentTypeError(f"{word!r} is no regular expression: {problem}")

    parser.add_argument("--gpus", type=whole(1), default=2, help="the most that are used")
    parser.add_argument("--counts", type=numbers,
                        help="numbers of GPUs to measure (default: 1,2,4,8 as far as there are)")
    parser.add_argument("--out", required=True, help="folder for the tables")
    parser.add_argument("--build", default=f"{ROOT}/build", help="folder with the programs")
    parser.add_argument("--steps", type=whole(3), default=10)
    parser.add_argument("--only", type=expression, default=re.compile(""),
                        help="techniques whose name matches this")
    parser.add_argument("--limit", type=whole(1), default=60, help="seconds that a run may take")
    parser.add_argument("--tiny", action="store_true", help="the tiny model, ranks as threads")
    flags = parser.parse_args()
    flags.counts = flags.counts or [n for n in (1, 2, 4, 8) if n <= flags.gpus]
    if max(flags.counts) > flags.gpus:
        parser.error(f"--counts {max(flags.counts)}: at most {flags.gpus} (--gpus)")
    names = [name for name, _, _, _ in TECHNIQUES]
    if not any(flags.only.search(name) for name in names):
        parser.error(f"--only {flags.only.pattern}: is in none of {', '.join(names)}")
    for _, program, _, _ in TECHNIQUES:
        if not os.path.exists(f"{flags.build}/{program}"):
            parser.error(f"{flags.build} has no {program}: build first, or name the folder with "
                         "--build")
    try:
        os.makedirs(flags.out, exist_ok=True)
    except OSError as problem:
        parser.error(f"--out: {problem}")
    return flags


if __name__ == "__main__":
    a = read_flags()
    rows = measure(earlier())
    sys.exit(not rows or any(r[2] == "failed" for r in rows))

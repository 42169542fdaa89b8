"""`python -m relax_llm_passes` is the command line."""

from .cli.supervise import entry

if __name__ == "__main__":
    raise SystemExit(entry())

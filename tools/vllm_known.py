"""Write known.json: the facts of every release of vLLM that flashstate serves.

    python -m tools.vllm_known FOLDER...    # each holds a release as a folder `vllm`

Prints the facts that were not known before. Read in vLLM what changed there, and run `make test-vllm-releases`, before
you commit them.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable
from pathlib import Path

from flashstate.integrations.vllm.contract import KNOWN, Sources, all_facts, known


def table(releases: Iterable[Sources]) -> dict[str, dict[str, str]]:
    """Return for each symbol its facts, with the first and the last release that states them."""
    found: dict[str, dict[str, list[str]]] = {}
    for sources in sorted(releases, key=lambda one: [int(number) for number in re.findall(r"\d+", one.version)]):
        for symbol, says in dict.fromkeys(all_facts(sources)):
            found.setdefault(symbol, {}).setdefault(says, []).append(sources.version)
    return {
        symbol: {says: " to ".join(dict.fromkeys((of[0], of[-1]))) for says, of in sorted(found[symbol].items())}
        for symbol in sorted(found)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where known.json says something else")
    options = parser.parse_args()
    releases = [Sources(folder / "vllm") for folder in options.folders]
    for sources in releases:
        for fact in dict.fromkeys(all_facts(sources)):
            if fact.says not in known().get(fact.symbol, ()):
                print(f"{sources.version}: {fact}")
    text = json.dumps(table(releases), indent=1) + "\n"
    if options.check and KNOWN.read_text() != text:
        raise SystemExit(f"{KNOWN} does not say what these releases say: write it anew")
    if not options.check:
        KNOWN.write_text(text)


if __name__ == "__main__":
    main()

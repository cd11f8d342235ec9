"""The page of what was found."""
from pathlib import Path
ROOT = Path(__file__).parents[2]
FOUND = Path(__file__).with_name("found.json")
PAGE = ROOT / "docs" / "parity.md"
def rendered(found): return ""

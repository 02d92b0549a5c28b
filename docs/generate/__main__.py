"""Write the generated parts of docs/reference."""

from __future__ import annotations

from docs.generate import FOLDER, PAGES, generated

for name in PAGES:
    (FOLDER / name).write_text(generated(name))

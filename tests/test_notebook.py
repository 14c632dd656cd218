"""examples/first_steps.ipynb runs from top to bottom, as it is, and shows what its words say."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the machinery of notebooks has warnings of its own
def test_the_notebook_runs_and_eshampoo_ends_lower(monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("sklearn")
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # other tests have the other cores
    notebook = nbformat.read(ROOT / "examples" / "first_steps.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=180, kernel_name="python3").execute()
    *_, table = (cell for cell in notebook.cells if cell.cell_type == "code")
    text = "".join(output["text"] for output in table.outputs if "text" in output)
    rows = [list(map(float, line.split())) for line in text.splitlines()[1:] if line.strip()]
    assert len(rows) == 3
    assert all(ours < adamw for _, adamw, ours in rows)

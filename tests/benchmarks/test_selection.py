"""The benchmark of ways to choose: what it picks and how it counts, on made-up results."""

import json

import numpy as np

from benchmarks.worth import selection


def fits(**columns):
    rows = [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]
    return [{"candidate": i, **row} for i, row in enumerate(rows)]


ROWS = {
    "all": fits(
        seconds=[1.0, 2.0, 3.0, 4.0],
        converged=[True, True, True, False],
        train_loss=[0.1, 0.1, 0.9, 0.1],
        n_features=[4, 4, 4, 4],
        test_score=[0.7, 0.9, 0.8, 0.5],
        relative_flatness=[3.0, 2.0, 1.0, 0.0],
        normalized_relative_flatness=[1.0, 2.0, 3.0, 0.0],
    ),
    "5-fold CV": fits(seconds=[4.0, 8.0, 12.0, 16.0], score=[0.6, 0.7, 0.5, 0.4]),
    "hold-out": fits(seconds=[1.0, 1.0, 1.0, 2.0], score=[0.9, 0.7, 0.5, 0.4]),
}


def test_picks():
    assert selection.picks(ROWS, n_train=100) == {
        "flattest": 1,  # the third is flatter, but not as deep, and the fourth is no minimum
        "flattest + risk": 1,  # 0.1 + 100^(-2/8) * 2/8 = 0.18 against 0.22
        "normalized flattest": 0,
        "5-fold CV": 1,
        "hold-out": 0,
    }


def test_regrets_and_costs(tmp_path):
    path = tmp_path / "results.jsonl"
    results = selection.Results(str(path))
    for what, rows in ROWS.items():
        for row in rows:
            results.add({"task": "made up", "split": 0, "what": what, **row})
    task = selection.tasks(None)["digits"]
    again = selection.Results(str(path))  # what is written down is not lost
    assert again.rows == results.rows
    assert len(path.read_text().splitlines()) == 12
    rows = {row[1]: row[2:] for row in selection.summarize("made up", task, 1, again)}
    assert rows["flattest"] == ["0.00 +- nan", "1.00"]
    assert rows["normalized flattest"] == ["20.00 +- nan", "1.00"]
    assert rows["5-fold CV"] == ["0.00 +- nan", "4.20"]  # 40 s, and 2 s for the pick, of 10 s
    assert rows["hold-out"] == ["20.00 +- nan", "0.60"]
    assert rows["random"] == ["17.50 +- nan", "0.25"]
    del again.rows["made up", 0, "hold-out", 0]  # a way whose fits are not all done is left out
    found = {row[1] for row in selection.summarize("made up", task, 1, again)}
    assert found == rows.keys() - {"hold-out"}


def test_a_candidate_is_trained_in_all_the_ways(tmp_path):
    task = selection.tasks(None)["breast cancer"]
    X, y, X_test, y_test = next(task.splits(1))
    at = {what: selection.run(task, (X, y, X_test, y_test), what, 39) for what in selection.WORK}
    assert json.loads(json.dumps(at)) == at
    assert at["all"]["converged"]
    assert at["all"]["n_features"] == 16
    assert 0.9 < at["all"]["test_score"] <= 1
    assert all(0.8 < at[what]["score"] <= 1 for what in ("5-fold CV", "hold-out"))
    assert at["all"]["relative_flatness"] > 0
    assert all(np.isfinite(at[what]["seconds"]) for what in at)

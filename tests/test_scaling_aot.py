"""The table of scaling by the compiler: its numbers from reports, and that it goes on."""

import csv

import pytest

from experiments import scaling_aot


def report(config, slice_, mesh):
    """On every slice the same work; n devices send 400 MiB (n - 1) / n."""
    n = scaling_aot.devices(slice_)
    return {
        "topology": slice_,
        "devices": n,
        "mesh": {name: int(size) for name, size in (part.split("=") for part in mesh.split(","))},
        "fits": True,
        "peak_bytes": 3 * 2**30,
        "model_flops": 0.4 * 197e12 / 100,  # 10 ms
        "parameters": 100 * 2**20,
        "flops": 5.0 + n,
        "bytes_accessed": 7.0,
        "collectives": {"all-reduce": {"sent": 400 * 2**20 * (n - 1) // n}},
    }


def rows(out):
    with open(f"{out}.csv", newline="") as file:
        return [*csv.DictReader(file)]


def test_numbers_and_a_second_run(tmp_path, monkeypatch):
    compiled = []

    def compile_line(config, slice_, mesh):
        compiled.append(mesh)
        return report(config, slice_, mesh)

    monkeypatch.setattr(scaling_aot, "compile_line", compile_line)
    out = tmp_path / "results" / "table"
    scaling_aot.main(["scaling_aot", f"--out={out}", "--slices=v5e:1x1,v5e:2x2"])
    one, data, fsdp = rows(out)
    assert one["sent_mib"] == "0" and one["efficiency"] == one["flops_of_one"] == "1"
    assert data["mesh"] == "data=4,fsdp=1" and data["flops_of_one"] == "1.5"
    assert float(data["sent_mib"]) == float(data["ideal_mib"]) == 300
    assert float(fsdp["ideal_mib"]) == 450
    link = 1e3 * 300 * 2**20 / 9e10
    assert float(data["efficiency"]) == pytest.approx(10 / (10 + link), rel=1e-2)
    assert data["overlapped"] == "1"
    assert "| based-tiny | llops |" in (tmp_path / "results" / "table.md").read_text()

    scaling_aot.main(["scaling_aot", f"--out={out}", "--slices=v5e:1x1,v5e:2x2,v5e:4x4"])
    assert compiled[3:] == ["data=1,fsdp=1", "data=16,fsdp=1", "data=1,fsdp=16"]
    assert [each["devices"] for each in rows(out)] == ["1", "4", "4", "16", "16"]


def test_what_does_not_fit_has_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(scaling_aot, "compile_line", lambda *unused: {"fits": False})
    scaling_aot.main(["scaling_aot", f"--out={tmp_path / 'a'}", "--slices=v5e:1x1"])
    assert rows(tmp_path / "a")[0]["gib"] == "does not fit"


@pytest.mark.parametrize("argument", ["--slices=v5e", "--slices=h200:2x2", "--axes=tensor"])
def test_wrong_settings_exit_with_2(argument):
    with pytest.raises(SystemExit) as stop:
        scaling_aot.main(["scaling_aot", argument])
    assert stop.value.code == 2

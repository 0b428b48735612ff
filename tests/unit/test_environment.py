"""The place of a process among the ranks, for each launcher, and every half-set of variables."""

import os

import pytest

from evenspan.config.environment import LaunchEnv, Launcher, first_host, launch_env, shows_gpu
from evenspan.errors import TopologyError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-host-4711@1",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "991",
    "SLURM_STEP_ID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[03-05],cpu1",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
}


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


def test_no_launcher_is_one_rank() -> None:
    env = launch_env({})
    assert (env.rank, env.world_size, env.local_rank, env.launcher) == (0, 1, 0, Launcher.SINGLE)
    assert env.is_main


def test_torchrun() -> None:
    assert launch_env(TORCHRUN) == LaunchEnv(
        rank=5,
        world_size=8,
        local_rank=1,
        local_world_size=4,
        master_addr="node0",
        master_port=29500,
        launcher=Launcher.TORCHRUN,
    )


def test_torchrun_wins_inside_a_slurm_job() -> None:
    assert launch_env({**SLURM, **TORCHRUN}).launcher is Launcher.TORCHRUN


def test_openmpi_on_one_machine() -> None:
    env = launch_env(OPENMPI)
    assert (env.rank, env.world_size, env.local_rank, env.local_world_size) == (3, 4, 3, 4)
    assert (env.master_addr, env.launcher) == ("127.0.0.1", Launcher.OPENMPI)
    assert 20000 <= env.master_port < 40000


def test_ranks_of_one_job_share_a_port_and_jobs_differ() -> None:
    others = launch_env({**OPENMPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"})
    assert others.master_port == launch_env(OPENMPI).master_port
    second = launch_env({**OPENMPI, "PMIX_NAMESPACE": "prterun-host-4712@1"})
    assert second.master_port != others.master_port


@pytest.mark.parametrize("variable", ["OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri"])
def test_openmpi_job_names_of_older_versions(variable: str) -> None:
    env = launch_env({**without(OPENMPI, "PMIX_NAMESPACE"), variable: "17"})
    assert 20000 <= env.master_port < 40000


def test_openmpi_takes_a_given_address_and_port() -> None:
    env = launch_env({**OPENMPI, "MASTER_ADDR": "node0", "MASTER_PORT": "1234"})
    assert (env.master_addr, env.master_port) == ("node0", 1234)


def test_openmpi_on_several_machines_needs_an_address() -> None:
    several = {**OPENMPI, "OMPI_COMM_WORLD_SIZE": "8"}
    with pytest.raises(TopologyError, match=r"T112.*8 ranks, 4 of them here.*\n.*MASTER_ADDR"):
        launch_env(several)
    assert launch_env({**several, "MASTER_ADDR": "node0"}).master_addr == "node0"


def test_slurm() -> None:
    env = launch_env(SLURM)
    assert (env.rank, env.world_size, env.local_rank, env.local_world_size) == (5, 7, 1, 3)
    assert (env.master_addr, env.launcher) == ("gpu03", Launcher.SLURM)
    assert launch_env({**SLURM, "SLURM_STEP_ID": "1"}).master_port != env.master_port


def test_slurm_repeated_task_counts() -> None:
    env = launch_env(
        {**SLURM, "SLURM_NTASKS": "11", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "2"}
    )
    assert env.local_world_size == 3


def test_a_batch_script_alone_with_several_tasks_is_an_error() -> None:
    with pytest.raises(TopologyError, match=r"T112.*SLURM_NTASKS=7.*\n.*srun"):
        launch_env(without(SLURM, "SLURM_STEP_NODELIST"))


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("gpu[03-05,9],cpu1", "gpu03"),
        ("n[7,9]", "n7"),
        ("rack[1-2]node[3-4]", "rack1node3"),
        ("login.example.org", "login.example.org"),
    ],
)
def test_first_host(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


@pytest.mark.parametrize(
    ("variables", "missing"),
    [
        (TORCHRUN, "MASTER_ADDR"),
        (TORCHRUN, "MASTER_PORT"),
        (TORCHRUN, "RANK"),
        (TORCHRUN, "WORLD_SIZE"),
        (TORCHRUN, "LOCAL_RANK"),
        (OPENMPI, "OMPI_COMM_WORLD_SIZE"),
        (OPENMPI, "OMPI_COMM_WORLD_LOCAL_RANK"),
        (SLURM, "SLURM_NTASKS"),
        (SLURM, "SLURM_LOCALID"),
    ],
)
def test_half_a_set_of_variables_is_named(variables: dict[str, str], missing: str) -> None:
    with pytest.raises(TopologyError, match=f"T110.*{missing} is not"):
        launch_env(without(variables, missing))


@pytest.mark.parametrize(
    ("variables", "names"),
    [(OPENMPI, ("PMIX_NAMESPACE",)), (SLURM, ("SLURM_JOB_ID", "SLURM_STEP_ID"))],
)
def test_without_a_job_name_there_is_no_port(variables: dict[str, str], names: tuple[str, ...]) -> None:
    with pytest.raises(TopologyError, match=r"T110.*MASTER_PORT"):
        launch_env(without(variables, *names))


@pytest.mark.parametrize(
    "changed", [{"RANK": "8"}, {"RANK": "-1"}, {"RANK": "one"}, {"LOCAL_RANK": "4"}, {"WORLD_SIZE": "0"}]
)
def test_impossible_numbers(changed: dict[str, str]) -> None:
    with pytest.raises(TopologyError, match="T111"):
        launch_env({**TORCHRUN, **changed})


def test_export_is_what_torch_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.setenv(name, "before")
    launch_env(OPENMPI).export()
    exported = {name: os.environ[name] for name in TORCHRUN}
    assert exported["RANK"] == "3"
    assert exported["WORLD_SIZE"] == "4"
    assert launch_env(exported).master_port == launch_env(OPENMPI).master_port


def test_a_port_beyond_the_last_is_named() -> None:
    torchrun = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
    with pytest.raises(TopologyError, match=r"T111 MASTER_PORT=65536 is no port"):
        launch_env({**torchrun, "MASTER_PORT": "65536"})
    assert launch_env({**torchrun, "MASTER_PORT": "65535"}).master_port == 65535


@pytest.mark.parametrize(
    ("node", "visible", "shown"),
    [
        ("nvidia0", None, True),
        ("nvidia3", "2,3", True),
        ("dxg", None, True),
        ("nvidia0", "", False),
        ("nvidia0", "-1", False),
        ("nvidiactl", None, False),
        ("null", "0", False),
    ],
)
def test_a_gpu_is_seen_without_torch(tmp_path, node, visible, shown):
    (tmp_path / node).touch()
    variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert shows_gpu(variables, devices=tmp_path) is shown

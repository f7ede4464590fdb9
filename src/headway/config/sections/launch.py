"""The section `launch`: how a cluster starts a run (`headway launch`). No part of a run's identity."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from headway.config.base import Section, conflict

#: A change that is merged into what is written, last: keys are merged, null removes one.
Patch = dict[str, Any]
#: Changes of manifests; each names its `kind`, and `metadata.name` where several have that kind.
Patches = list[dict[str, Any]]
_DURATION = r"^[0-9]+(-[0-9]{1,2})?(:[0-9]{1,2}){0,2}$"
_ENVIRONMENT_NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"
EnvironmentName = Annotated[str, Field(pattern=_ENVIRONMENT_NAME)]


class SlurmConfig(Section):
    """Jobs of Slurm."""

    account: str | None = None
    """Account that pays (`--account`)."""
    partition: str | None = None
    """Partition (`--partition`)."""
    qos: str | None = None
    """Quality of service (`--qos`)."""
    time: Annotated[str, Field(pattern=_DURATION)] | None = None
    """Time limit, as Slurm writes it: `24:00:00`, `2-00:00:00`. The run saves before it and is queued again."""
    gres: str | None = None
    """Resources of each machine (`--gres`); `gpu:N` of the GPUs per machine when not given."""
    setup: list[str] = []
    """Lines of shell before the run starts: `module load cuda`, `source .venv/bin/activate`."""
    container: str | None = None
    """Image that each machine runs in (`--container-image` of Pyxis); `launch.image` is for other targets."""
    container_mounts: list[str] = []
    """Folders that are mounted in it (`--container-mounts`)."""
    patch: Patch = {}
    """Options of sbatch that are added or replaced, null removes one: `{exclusive: true, mem: 64G}`."""


class VolumeConfig(Section):
    """A volume of pods: a claim that exists, or one that is written when `size` is given."""

    claim: str
    """Name of the PersistentVolumeClaim."""
    mount: Annotated[str, Field(pattern="^/")]
    """Folder in the container."""
    read_only: bool = False
    """Machines only read it, as data (`ReadOnlyMany`), which the job that prepares the data writes; otherwise all
    machines write (`ReadWriteMany`)."""
    size: str | None = None
    """Write the claim, with this capacity: `1Ti`."""
    storage_class: str | None = None
    """Storage class of a claim that is written."""


class TolerationConfig(Section):
    """A taint of nodes that pods tolerate."""

    key: str
    """Key of the taint."""
    value: str | None = None
    """Its value; any when not given."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Its effect; any when not given."""


class RdmaConfig(Section):
    """Direct access to the network's hardware, which needs more rights than other pods have."""

    resource: str
    """Resource of the device plug-in, e.g. `rdma/hca_shared_devices_a`."""
    count: PositiveInt = 1
    """Devices per machine."""
    reason: Annotated[str, Field(min_length=8)]
    """Why the run needs it; it is written into the manifest, beside the capability IPC_LOCK that it grants."""


class HostNetworkConfig(Section):
    """The network of the node instead of the pod's own, where no NetworkPolicy holds."""

    reason: Annotated[str, Field(min_length=8)]
    """Why the run needs it; it is written into the manifest."""


class QueueConfig(Section):
    """A queue that starts all pods of a run or none."""

    kind: Literal["kueue", "volcano"]
    """Which scheduler holds the queue."""
    name: str
    """Name of the queue (Kueue: LocalQueue)."""


class KubernetesConfig(Section):
    """What the pods of all targets of Kubernetes are: plain Jobs, JobSet, TrainJob, PyTorchJob and RayJob."""

    context: str | None = None
    """Context of kubectl; the current one when not given."""
    namespace: str = "default"
    """Namespace of everything that is written."""
    create_namespace: bool = False
    """Also write the namespace, with the Pod Security level that the run needs."""
    service_account: str | None = None
    """Service account that exists. When not given, one without any rights is written."""
    service_account_annotations: dict[str, str] = {}
    """Annotations of the one that is written, for workload identity:
    `{eks.amazonaws.com/role-arn: arn:aws:iam::1:role/x}`."""
    pull_secret_names: list[str] = []
    """Names of secrets with which images are pulled."""
    secret_names: list[str] = []
    """Names of secrets whose keys become environment variables, e.g. credentials of object storage."""
    volumes: list[VolumeConfig] = []
    """Volumes with data and for run directories."""
    prepared: bool = False
    """The token store on its volume is prepared already: no job is written that prepares it, and pods need not see the
    sources."""
    shared_memory: str | None = None
    """Size of /dev/shm, e.g. `64Gi`, which counts as memory of the machine; `memory` when not given, or 64Gi."""
    cpus: Annotated[float, Field(gt=0.0)] | None = None
    """Processors of each machine."""
    memory: str | None = None
    """Memory of each machine, e.g. `900Gi`."""
    scratch: str = "50Gi"
    """Most that a pod may keep in its own folders, which go with it: `/tmp`, and runs and store where they are on no
    volume."""
    gpu_resource: str = "nvidia.com/gpu"
    """Resource of the device plug-in that counts GPUs."""
    time_slicing: Annotated[int, Field(ge=2)] | None = None
    """For development: write the device plug-in's settings by which so many pods share a GPU. Applied by an
    administrator, never by the launch."""
    user: PositiveInt = 1000
    """User and group of the container, never root."""
    priority_class: str | None = None
    """PriorityClass of the pods."""
    node_selector: dict[str, str] = {}
    """Labels of the nodes, e.g. `{node.kubernetes.io/instance-type: p5.48xlarge}`."""
    tolerations: list[TolerationConfig] = []
    """Taints that the pods tolerate."""
    spread: str | None = None
    """Topology key over which machines spread, one each where possible, e.g. `kubernetes.io/hostname`."""
    pack: str | None = None
    """Topology key within which all machines must lie, e.g. `topology.kubernetes.io/zone`."""
    queue: QueueConfig | None = None
    """Gang scheduling."""
    quota: dict[str, str | int] = {}
    """Limits of a ResourceQuota that is written for the namespace: `{requests.nvidia.com/gpu: 16, pods: 20}`."""
    autoscaled: bool = False
    """Nodes are added on demand, so that GPUs which are not there yet are no error."""
    network_policy: bool = True
    """Write a NetworkPolicy: pods of a run talk to each other, to name servers, to `egress_ports`, to the ports of all
    addresses in the config, and to the metadata service of a cloud whose notices are watched."""
    egress_ports: list[Annotated[int, Field(ge=1, le=65535)]] = [443]
    """Ports outside that pods may reach, for object storage, the Hub, and addresses that the config does not name."""
    host_network: HostNetworkConfig | None = None
    """Use the node's network."""
    rdma: RdmaConfig | None = None
    """Use RDMA."""
    metrics_port: Annotated[int, Field(ge=1024, le=65535)] | None = None
    """Port of an exporter in the image; a PodMonitor for Prometheus is written for it."""
    max_failures: Annotated[int, Field(ge=0)] = 6
    """Maximum number of failures, evictions and exit code 75 aside. Each may cost the pods of all machines, so
    `backoffLimit`, which counts pods, is this times the machines."""
    keep_seconds: Annotated[int, Field(ge=0)] = 7 * 86400
    """How long a finished job is kept (`ttlSecondsAfterFinished`)."""
    patch: Patches = []
    """Changes of manifests, merged last; one with `apiVersion` that matches none is added."""


class EnvelopeConfig(Section):
    """Further settings of a kind of job of Kubernetes; pods are described by `launch.kubernetes`."""

    patch: Patches = []
    """Changes of manifests, merged after those of `launch.kubernetes.patch`."""


class RayJobConfig(EnvelopeConfig):
    """RayJob of KubeRay: a Ray cluster that lives as long as the run."""

    ray_version: str = "2.60.0"
    """Version of Ray in the image."""
    min_machines: Annotated[int, Field(ge=0)] | None = None
    """Fewest workers of the cluster, which turns its autoscaler on."""
    max_machines: PositiveInt | None = None
    """Maximum number of workers of the cluster; the run's machines when not given."""
    tls_secret_name: str | None = None
    """Name of a secret with `tls.crt`, `tls.key` and `ca.crt`, with which Ray encrypts its own connections."""
    dashboard_port: Annotated[int, Field(ge=1024, le=65535)] = 8265
    """Port of Ray's dashboard, within the cluster only."""


class RayConfig(Section):
    """A Ray cluster that exists."""

    address: str | None = None
    """Address of its dashboard, for `ray job submit`; RAY_ADDRESS when not given."""
    max_failures: Annotated[int, Field(ge=-1)] = 3
    """Maximum number of lost machines or node processes after which Ray starts all again; -1 is no limit."""
    wait_seconds: Annotated[float, Field(ge=0.0)] = 300.0
    """How long a run waits for machines that the cluster does not have."""
    storage: str | None = None
    """Folder or URL that all machines share, for what Ray Train keeps (`RunConfig.storage_path`)."""
    packages: list[str] = []
    """Packages that Ray installs on its machines (`pip` of the runtime environment)."""
    ship: bool = False
    """Send the Headway that launches to the machines, which import it instead of theirs. What it requires must be
    there."""
    patch: Patch = {}
    """Changes of the runtime environment, merged last."""


class SkyConfig(Section):
    """SkyPilot: machines of any cloud, or pools of your own."""

    infra: str | None = None
    """Where: `aws/us-east-1`, `gcp`, `k8s/context`, `ssh/pool`; the cheapest when not given."""
    accelerators: str | None = None
    """Accelerators of each machine, as `H100:8`."""
    instance_type: str | None = None
    """Instance type, instead of accelerators."""
    spot: bool = True
    """Take spot machines."""
    setup: list[str] = [
        "python -m pip install {headway}",
        "python -m pip install --force-reinstall --no-deps {headway}",
    ]
    """Lines of shell that prepare a machine. `{headway}` stands for what pip is to install as Headway
    (`launch.package`, `launch.extras`). The second line replaces a Headway of the same version that is there."""
    workdir: str | None = None
    """Folder that is copied to the machines, with your own code."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """Maximum number of restarts after errors; exit code 75 always restarts."""
    patch: Patch = {}
    """Changes of the task, merged last."""


class MetaflowConfig(Section):
    """A flow of Metaflow, which prepares, trains, evaluates and exports; pods are described by `launch.kubernetes`."""

    where: Literal["local", "argo"] = "local"
    """`local`: the flow runs on this machine. `argo`: it is deployed to Argo Workflows, and each step is a pod."""
    python: str = "python"
    """Interpreter with Metaflow, on the machine that launches."""
    datastore: Literal["local", "s3", "azure", "gs"] | None = None
    """Where Metaflow keeps artifacts and cards; what its own configuration says when not given."""
    retries: Annotated[int, Field(ge=0, le=4)] = 4
    """Maximum number of restarts of a step, after exit code 75 or a kill. Metaflow itself allows 4."""
    minutes_between_retries: Annotated[int, Field(ge=0)] = 1
    """Pause before it."""
    patch: dict[str, Patch] = {}
    """Arguments of `@kubernetes` that are added or replaced, by step: `{train: {qos: Guaranteed}}`."""


class LaunchConfig(Section):
    """How a cluster starts a run, with `headway launch` ([launch.md](launch.md))."""

    image: str | None = None
    """Container image with Headway and your code; required for Kubernetes."""
    package: str | None = None
    """What machines that prepare themselves (SkyPilot) install as Headway: a wheel of this machine, or what pip takes,
    as `git+https://...`. When not given, a wheel is made of the Headway that launches, and travels with the launch."""
    extras: list[str] = []
    """Extras of that wheel that they install too, as `[hf, peft]`; those for the URLs of the config are added."""
    gpus_per_machine: Annotated[int, Field(ge=0)] | None = None
    """GPUs of each machine; `parallel.workers` when not given, 0 with `train.device: cpu`."""
    accelerator: str | None = None
    """Their name, as `headway plan` knows it (`H100`), for the table before the launch."""
    port: Annotated[int, Field(ge=1024, le=65535)] = 29400
    """Port of the first machine, where the others meet it. On Slurm each step has its own port."""
    grace_seconds: Annotated[int, Field(ge=1)] | None = None
    """Time between the signal to stop and the kill. When not given, three times the last save of the run, at least
    120."""
    workdir: str = "/workspace"
    """Working directory in the container, to which relative paths of the config refer."""
    environment: dict[EnvironmentName, str] = {}
    """Environment variables of the machines; credentials come from secrets instead."""
    slurm: SlurmConfig = SlurmConfig()
    kubernetes: KubernetesConfig = KubernetesConfig()
    jobset: EnvelopeConfig = EnvelopeConfig()
    trainjob: EnvelopeConfig = EnvelopeConfig()
    pytorchjob: EnvelopeConfig = EnvelopeConfig()
    rayjob: RayJobConfig = RayJobConfig()
    ray: RayConfig = RayConfig()
    sky: SkyConfig = SkyConfig()
    metaflow: MetaflowConfig = MetaflowConfig()

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        low = self.rayjob.min_machines
        high = self.rayjob.max_machines
        if low is not None and high is not None and low > high:
            raise conflict("min_machines is more than max_machines", "rayjob.min_machines", "rayjob.max_machines")
        return self

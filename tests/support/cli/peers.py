"""Job files of other schedulers, as people bring them: three and more of each kind."""

SKY = (
    """
name: pretrain
resources:
  accelerators: {A100: 8}
  cpus: 16+
  memory: 64
  use_spot: true
  image_id: docker:example/llm:3
  job_recovery: {max_restarts_on_errors: 2}
num_nodes: 4
workdir: ~/llm
envs: {MODEL: gpt2, LR: 0.001}
secrets: {WANDB_API_KEY: null}
setup: |
  pip install -r requirements.txt
run: |
  HEAD=$(echo "$SKYPILOT_NODE_IPS" | head -n1)
  torchrun --nnodes=$SKYPILOT_NUM_NODES --node_rank=${SKYPILOT_NODE_RANK} --master_addr=$HEAD train.py
""",
    """
resources: {infra: gcp, accelerators: "T4:0.5", disk_size: 256, ports: [8080]}
file_mounts:
  /data: s3://bucket/data
run: python eval.py --data /data
""",
    """
name: pipeline
---
name: train
resources: {accelerators: [L4, A10G]}
run: python train.py
---
name: eval
resources: {accelerators: "L4:1"}
envs: {CHECKPOINT: null}
run: python eval.py
""",
    "\ufeffname: bom\r\nenvs:\r\n  A: b\r\nrun: |\r\n  echo $A\r\n  echo two\r\n",
)
DSTACK = (
    """
type: task
name: train
python: "3.11"
nodes: 2
env: [HF_HUB=1, HF_TOKEN]
commands:
  - pip install -r requirements.txt
  - torchrun --nnodes=$DSTACK_NODES_NUM --node_rank=$DSTACK_NODE_RANK
     --master-addr=$DSTACK_MASTER_NODE_IP train.py
resources: {gpu: "A100:80GB:4", memory: 200GB.., cpu: 16.., shm_size: 16GB, disk: 500GB}
max_duration: 3d
spot_policy: auto
""",
    """
type: task
image: example/trainer:2
env: {EPOCHS: 3}
commands: [python train.py]
resources:
  gpu: {name: [H100, H200], count: 1..2, memory: 80GB..}
retry: {on_events: [no-capacity, error], duration: 1h}
ports: [6006]
volumes: [data:/data]
""",
    """
type: task
name: cheap
commands: [echo hi]
resources: {gpu: 24GB}
backends: [aws]
stop_duration: 90s
""",
    """
type: task
env: {WANDB_API_KEY: "${{ secrets.wandb }}", MODE: 010}
commands:
  - |
    torchrun \\
      --nproc-per-node=$DSTACK_GPUS_PER_NODE train.py
files: [data.csv]
resources: {gpu: "nvidia:1..8:24GB..", shm_size: 24GB, cpu: "x86:8.."}
max_duration: off
retry: true
""",
)
KUBEFLOW = (
    """
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: bert, namespace: team-a, labels: {app: bert}}
spec:
  runPolicy: {cleanPodPolicy: None, backoffLimit: 2, activeDeadlineSeconds: 7200}
  pytorchReplicaSpecs:
    Master: &role
      replicas: 1
      restartPolicy: OnFailure
      template:
        spec:
          nodeSelector: {nvidia.com/gpu.product: Tesla-V100-SXM2-16GB}
          volumes: [{name: data, persistentVolumeClaim: {claimName: data}}]
          containers:
            - name: pytorch
              image: example/bert:1
              command: [python, train.py]
              args: [--epochs, "3"]
              env: [{name: A, value: "1"}, {name: KEY, valueFrom: {secretKeyRef: {name: wandb, key: api}}}]
              resources: {limits: {nvidia.com/gpu: 2, cpu: 4, memory: 16Gi}, requests: {cpu: 3500m}}
              volumeMounts: [{name: data, mountPath: /data}]
    Worker:
      <<: *role
      replicas: 3
""",
    """
apiVersion: kubeflow.org/v1
kind: TFJob
metadata: {generateName: mnist-}
spec:
  tfReplicaSpecs:
    PS:
      replicas: 1
      template: {spec: {containers: [{name: tensorflow, image: "tf:2", command: [python, ps.py]}]}}
    Worker:
      replicas: 2
      template: {spec: {containers: [{name: tensorflow, image: "tf:2", command: [python, w.py],
          resources: {limits: {nvidia.com/gpu: "1"}}}]}}
""",
    """
apiVersion: batch/v1
kind: Job
metadata: {name: once}
spec:
  backoffLimit: 0
  ttlSecondsAfterFinished: 60
  template:
    spec:
      restartPolicy: Never
      terminationGracePeriodSeconds: 45
      tolerations: [{key: nvidia.com/gpu, operator: Exists}]
      containers:
        - {name: main, image: "busybox", command: [sh, -c, "echo hi"], workingDir: /w,
            resources: {limits: {memory: "1500000000"}}}
        - {name: sidecar, image: "log-shipper"}
""",
    """
apiVersion: kubeflow.org/v2beta1
kind: MPIJob
metadata: {name: horovod}
spec:
  slotsPerWorker: 4
  mpiReplicaSpecs:
    Launcher: {replicas: 1, template: {spec: {containers: [{name: l, image: x, command: [mpirun, -np, "8",
        python, t.py]}]}}}
    Worker: {replicas: 2, template: {spec: {containers: [{name: w, image: x,
        resources: {limits: {nvidia.com/gpu: 4}}}]}}}
""",
)
RAY = (
    """
{"entrypoint": "python train.py --lr 0.1", "submission_id": "raysubmit_1",
 "runtime_env": {"working_dir": "./", "pip": ["torch==2.4", "datasets"], "env_vars": {"A": "1"},
     "py_modules": ["lib"]},
 "entrypoint_num_gpus": 1, "entrypoint_num_cpus": 0.5, "entrypoint_memory": 1073741824,
 "metadata": {"team": "nlp"}}
""",
    """
apiVersion: ray.io/v1
kind: RayJob
metadata: {name: tune}
spec:
  entrypoint: python tune.py
  shutdownAfterJobFinishes: true
  activeDeadlineSeconds: 600
  runtimeEnvYAML: |
    env_vars: {B: "2"}
  rayClusterSpec:
    rayVersion: "2.9.0"
    headGroupSpec: {rayStartParams: {}, template: {spec: {containers: [{name: h,
        image: "rayproject/ray:2.9.0-gpu"}]}}}
    workerGroupSpecs:
      - {groupName: gpus, replicas: 2, template: {spec: {containers: [{name: w,
          image: "rayproject/ray:2.9.0-gpu", resources: {limits: {nvidia.com/gpu: 4}}}]}}}
""",
    """
name: anyscale
entrypoint: python main.py && echo done
image_uri: anyscale/ray:2.9
compute_config: {head_node: {instance_type: m5}}
working_dir: s3://bucket/code
requirements: requirements.txt
max_retries: 1
""",
    """
[{"entrypoint": "python a.py", "submission_id": "a 1", "runtime_env": {}},
 {"entrypoint": "FOO=1 python b.py > out.log", "runtime_env": {"pip": "req.txt", "uv": ["x"]},
     "entrypoint_num_gpus": 0.5}]
""",
    """
{"entrypoint": "python c.py", "entrypoint_num_cpus": 4, "entrypoint_memory": "2147483648",
    "entrypoint_resources": {"fpga": 1},
 "runtime_env": {"working_dir": "https://example.org/code.zip", "conda": {"dependencies": ["pytorch"]},
     "excludes": ["*.pt"]}, "metadata": null}
""",
)
ARGO = (
    """
apiVersion: argoproj.io/v1alpha1
kind: Workflow
metadata: {generateName: train-, labels: {team: cv}}
spec:
  entrypoint: main
  arguments: {parameters: [{name: lr, value: 0.1}, {name: epochs}]}
  ttlStrategy: {secondsAfterCompletion: 60}
  templates:
    - name: main
      retryStrategy: {limit: 2}
      activeDeadlineSeconds: 900
      container:
        image: python:3.11
        command: [python, train.py]
        args: ["--lr={{workflow.parameters.lr}}", "--epochs", "{{workflow.parameters.epochs}}"]
        resources: {limits: {nvidia.com/gpu: 1}}
""",
    """
apiVersion: argoproj.io/v1alpha1
kind: Workflow
metadata: {name: chain}
spec:
  entrypoint: dag
  volumes: [{name: data, persistentVolumeClaim: {claimName: data}}]
  templates:
    - name: dag
      dag:
        tasks:
          - {name: prepare, template: run, arguments: {parameters: [{name: stage, value: prepare}]}}
          - {name: fit, template: run, dependencies: [prepare], arguments: {parameters: [{name: stage,
              value: fit}]}}
    - name: run
      inputs: {parameters: [{name: stage}, {name: size, default: small}]}
      container: {image: example/p:1, command: [python, "{{inputs.parameters.stage}}.py",
          "{{inputs.parameters.size}}"]}
      outputs: {artifacts: [{name: out, path: /out}]}
""",
    """
apiVersion: argoproj.io/v1alpha1
kind: CronWorkflow
metadata: {name: nightly}
spec:
  schedule: "0 3 * * *"
  workflowSpec:
    entrypoint: go
    templates:
      - name: go
        steps:
          - [{name: one, template: script}]
          - [{name: sweep, template: script, withItems: [1, 2]}]
      - name: script
        script: {image: python:3, command: [python], source: "print('{{workflow.name}}')"}
""",
)
DETERMINED = (
    """
name: mnist_const
entrypoint: python3 train.py --epochs 3
resources: {slots_per_trial: 2, resource_pool: default, shm_size: 1g}
searcher: {name: single, metric: validation_loss, max_length: {batches: 100}, smaller_is_better: true}
max_restarts: 3
environment: {image: {cuda: "example/det:1", cpu: "example/det:0"}, environment_variables: [A=1, B]}
hyperparameters: {lr: 0.1, global_batch_size: 64}
checkpoint_storage: {type: shared_fs, host_path: /ckpt}
""",
    """
name: asha
entrypoint: [python3, -m, determined.launch.torch_distributed, python3, train.py]
searcher: {name: adaptive_asha, metric: loss, max_trials: 16, max_length: {epochs: 4}}
hyperparameters: {lr: {type: log, base: 10, minval: -4, maxval: -1}}
""",
    """
name: legacy
entrypoint: model_def:MNistTrial
searcher: {name: single, metric: loss, max_length: {records: 1000}}
resources: {slots_per_trial: 16}
""",
    """
name: large
entrypoint: torchrun train.py
resources: {slots_per_trial: 32, priority: 50}
searcher: {name: single, metric: loss}
workspace: research
""",
)
SBATCH = (
    """#!/bin/bash
#SBATCH --job-name=resnet
#SBATCH -N 2 --ntasks-per-node=4   # eight tasks
#SBATCH --gres=gpu:a100:4
#SBATCH -c 4
#SBATCH --mem=64G
#SBATCH -t 1-02:30:00
#SBATCH --array=0-3%2
#SBATCH --output=logs/%x-%A_%a.out
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
##SBATCH --partition=commented
module load cuda/12.1
source activate torch
export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -1)
srun --unbuffered python train.py --rank $SLURM_PROCID --seed $SLURM_ARRAY_TASK_ID
#SBATCH --qos=late
""",
    """#!/bin/bash -l
#SBATCH --gpus-per-node=2
#SBATCH --mem-per-cpu=4000
#SBATCH --cpus-per-task 8
#SBATCH --time=90
#SBATCH --partition gpu --account=lab
#SBATCH --mail-type=END --mail-user=ana@example.org
#SBATCH --export=ALL,MODE=fast
#SBATCH --exclusive
torchrun --standalone --nproc_per_node=2 train.py
""",
    """#!/bin/sh\r
#SBATCH -J cpu-only\r
#SBATCH -n 1\r
#SBATCH --dependency=afterok:123\r
#SBATCH --hint=nomultithread\r
echo done\r
""",
    """#!/bin/bash
#SBATCH --nodes=2 --gpus=4
#SBATCH --wibble=1
python train.py
""",
    """#!/bin/bash
#SBATCH -J gpt-%j -N 4 --ntasks-per-node=1 --gpus-per-node=h100:8 --cpus-per-task=96 --mem=0
#SBATCH --dependency=singleton --constraint="a100|h100"
set -euo pipefail
module load cuda/12.2
conda activate torch
nodes=( $( scontrol show hostnames $SLURM_JOB_NODELIST ) )
head_node=${nodes[0]}
head=$(srun --nodes=1 --ntasks=1 -w "$head_node" hostname --ip-address)
export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
cat > /tmp/cfg-$SLURM_JOB_ID <<EOF
nodes: $SLURM_NNODES
EOF
srun torchrun --nnodes $SLURM_NNODES --rdzv_id $RANDOM --rdzv_endpoint $head:$MASTER_PORT train.py
""",
)

"""Manifests for Kubernetes, as people bring them: three and more of each kind that is converted.

Kubeflow's kinds of version 1 differ in the name of the section alone, so that their files are made from three
shapes.
"""

from penstock.imports.kubernetes import ROLES

MASTER_AND_WORKERS = """
apiVersion: kubeflow.org/v1
kind: {kind}
metadata: {{name: resnet, namespace: vision, annotations: {{sidecar.istio.io/inject: "false"}}}}
spec:
  runPolicy: {{backoffLimit: 4, cleanPodPolicy: Running, schedulingPolicy: {{minAvailable: 3}}}}
  {roles}:
    Master: &pods
      replicas: 1
      restartPolicy: OnFailure
      template:
        metadata: {{annotations: {{a: b}}}}
        spec:
          nodeSelector: {{nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3, zone: a}}
          tolerations: [{{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}}]
          initContainers: [{{name: fetch, image: tools, command: [sh, -c, "cp -r /mirror /data"]}}]
          priorityClassName: high
          volumes: [{{name: shm, emptyDir: {{medium: Memory, sizeLimit: 64Gi}}}}]
          containers:
            - name: main
              image: example/resnet:4
              imagePullPolicy: Always
              command: [torchrun, train.py]
              env:
                - {{name: NODE, valueFrom: {{fieldRef: {{fieldPath: spec.nodeName}}}}}}
                - {{name: TOKEN, valueFrom: {{secretKeyRef: {{name: hub, key: token}}}}}}
                - {{name: SEED, value: 7}}
              envFrom: [{{configMapRef: {{name: settings}}}}]
              resources:
                requests: {{cpu: "12", memory: 100G, nvidia.com/gpu: 8, rdma/hca: 1}}
                limits: {{nvidia.com/gpu: 8, memory: 0.125Ti, ephemeral-storage: 100Gi}}
              volumeMounts: [{{name: shm, mountPath: /dev/shm}}]
    Worker:
      <<: *pods
      replicas: 2
"""
WORKERS = """
apiVersion: kubeflow.org/v1
kind: {kind}
metadata: {{generateName: tune-, labels: {{kueue.x-k8s.io/queue-name: research}}}}
spec:
  runPolicy: {{suspend: true, ttlSecondsAfterFinished: 600}}
  {roles}:
    Worker:
      replicas: "4"
      restartPolicy: Never
      template:
        spec:
          containers: [{{name: main, image: example/tune, command: [bash, -c],
              args: ["python tune.py --rank $RANK"], resources: {{limits: {{nvidia.com/gpu: "1",
                  cpu: 2500m}}}}}}]
"""
BESIDE_OTHERS = """
apiVersion: v1
kind: ConfigMap
metadata: {{name: settings}}
data: {{lr: "0.1"}}
---
apiVersion: kubeflow.org/v1
kind: {kind}
metadata: {{name: small}}
spec:
  {roles}:
    Worker:
      template:
        spec: {{containers: [{{name: main, image: example/small, command: [python, -m, small],
            workingDir: /code, resources: {{requests: {{memory: 512Mi}}}}}}]}}
"""
MANIFESTS: dict[str, tuple[str, ...]] = {
    kind: tuple(
        shape.format(kind=kind, roles=roles) for shape in (MASTER_AND_WORKERS, WORKERS, BESIDE_OTHERS)
    )
    for kind, roles in ROLES.items()
} | {
    "Pod": (
        """
apiVersion: v1
kind: Pod
metadata: {name: debug}
spec:
  restartPolicy: Never
  activeDeadlineSeconds: 600
  hostNetwork: true
  containers: [{name: c, image: "example/cuda:12", command: [nvidia-smi],
      resources: {limits: {nvidia.com/gpu: 1}}}]
""",
        """
apiVersion: v1
kind: List
items:
  - {apiVersion: v1, kind: Pod, metadata: {name: one}, spec: {containers: [{name: c, image: i,
      command: [python, one.py]}]}}
  - {apiVersion: v1, kind: Pod, metadata: {name: two}, spec: {containers: [{name: c, image: i,
      command: [python, two.py]}]}}
""",
        """
{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "json", "labels": {"a": "b"}},
\t"spec": {"containers": [{"name": "c", "image": "i", "command": ["python", "$(SCRIPT)"],
    "resources": {"limits": {"nvidia.com/mig-1g.5gb": 1}}}]}}
""",
    ),
    "Job": (
        """
apiVersion: batch/v1
kind: Job
metadata: {name: indexed}
spec:
  completions: 8
  parallelism: 4
  completionMode: Indexed
  backoffLimitPerIndex: 1
  podFailurePolicy: {rules: []}
  template: {spec: {restartPolicy: Never, containers: [{name: m, image: i, command: [sh, -c,
      "python shard.py $JOB_COMPLETION_INDEX"], resources: {limits: {cpu: 1500m, memory: 512Mi}}}]}}
""",
        """
apiVersion: batch/v1
kind: Job
metadata: {name: once}
spec:
  activeDeadlineSeconds: 3600
  template: {spec: {restartPolicy: OnFailure, containers: [{name: m, image: i, args: [--epochs, "3"],
      resources: {limits: {amd.com/gpu: 2}}}]}}
""",
        """
apiVersion: batch.volcano.sh/v1alpha1
kind: Job
metadata: {name: gang}
spec:
  minAvailable: 3
  schedulerName: volcano
  queue: research
  maxRetry: 2
  plugins: {pytorch: [--master=master], svc: []}
  tasks:
    - {replicas: 1, name: master, policies: [{event: TaskCompleted, action: CompleteJob}],
        template: {spec: {containers: [{name: m, image: i, command: [python, t.py],
            resources: {limits: {nvidia.com/gpu: 1}}}]}}}
    - {replicas: 2, name: worker, template: {spec: {containers: [{name: w, image: i, command: [python, t.py],
        resources: {limits: {nvidia.com/gpu: 1}}}]}}}
""",
        """
apiVersion: batch.volcano.sh/v1alpha1
kind: Job
metadata: {name: servers}
spec:
  minAvailable: 1
  tasks:
    - {replicas: 2, name: ps, template: {spec: {containers: [{name: m, image: i, command: [python, t.py]}]}}}
    - {replicas: 3, name: worker, minAvailable: 1, template: {spec: {containers: [{name: w, image: i,
        command: [python, t.py], resources: {limits: {nvidia.com/gpu: 1}}}]}}}
""",
        """
apiVersion: batch.volcano.sh/v1alpha1
kind: Job
metadata: {name: alone}
spec:
  tasks: [{template: {spec: {containers: [{name: w, image: i, command: [python, t.py]}]}}}]
  ttlSecondsAfterFinished: 10
""",
    ),
    "CronJob": (
        """
apiVersion: batch/v1
kind: CronJob
metadata: {name: nightly}
spec:
  schedule: "0 3 * * *"
  concurrencyPolicy: Forbid
  successfulJobsHistoryLimit: 1
  jobTemplate: {spec: {backoffLimit: 1, template: {spec: {restartPolicy: OnFailure, containers: [{name: c,
      image: i, command: [python, nightly.py]}]}}}}
""",
        """
apiVersion: batch/v1
kind: CronJob
metadata: {name: hourly}
spec:
  schedule: "@hourly"
  timeZone: Asia/Kolkata
  suspend: true
  jobTemplate: {metadata: {labels: {a: b}}, spec: {template: {spec: {containers: [{name: c, image: i,
      command: [sh, -c, "date; python eval.py"], resources: {limits: {nvidia.com/gpu: 1}}}]}}}}
""",
        """
apiVersion: batch/v1
kind: CronJob
metadata: {generateName: sweep-}
spec: {schedule: "0 0 * * 0", jobTemplate: {spec: {parallelism: 2, completions: 2,
    template: {spec: {containers: [{name: c, image: i, command: [python, s.py]}]}}}}}
""",
    ),
    "JobSet": (
        """
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {name: pretrain}
spec:
  failurePolicy: {maxRestarts: 3}
  network: {enableDNSHostnames: true}
  replicatedJobs:
    - {name: workers, replicas: 2, template: {spec: {parallelism: 4, completions: 4, backoffLimit: 0,
        template: {spec: {containers: [{name: c, image: i, command: [torchrun, t.py],
            resources: {limits: {nvidia.com/gpu: 8}}}]}}}}}
""",
        """
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {name: driver}
spec:
  successPolicy: {operator: All, targetReplicatedJobs: [driver]}
  replicatedJobs:
    - {name: driver, template: {spec: {template: {spec: {containers: [{name: c, image: i, command: [python,
        d.py]}]}}}}}
    - {name: workers, dependsOn: [{name: driver, status: Ready}], template: {spec: {parallelism: 2,
        template: {spec: {containers: [{name: c, image: i, command: [python, w.py]}]}}}}}
""",
        """
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {name: one, labels: {kueue.x-k8s.io/queue-name: q}}
spec: {suspend: true, replicatedJobs: [{name: a, replicas: 1, template: {metadata: {},
    spec: {template: {spec: {containers: [{name: c, image: i, command: [python, a.py]}]}}}}}]}
""",
    ),
    "TrainJob": (
        """
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: llama}
spec:
  runtimeRef: {name: torch-distributed}
  trainer: {image: example/llama, command: [torchrun, train.py], numNodes: 2, numProcPerNode: 4,
      env: [{name: LR, value: "0.1"}], resourcesPerNode: {limits: {nvidia.com/gpu: 4}}}
  initializer: {model: {storageUri: "hf://example/llama"}}
""",
        """
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: defaults}
spec: {runtimeRef: {name: torch-distributed}, trainer: {args: [--epochs, "3"]}}
""",
        """
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: one}
spec: {suspend: false, managedBy: kueue, trainer: {image: i, command: [python, t.py],
    resourcesPerNode: {requests: {cpu: 4, memory: 8Gi}}}, podTemplateOverrides: [{targetJobs: []}]}
""",
    ),
    "RayJob": (
        """
apiVersion: ray.io/v1
kind: RayJob
metadata: {name: heredoc}
spec:
  entrypoint: |
    python - <<EOF
    import ray
    ray.init()
    EOF
  backoffLimit: 2
  runtimeEnvYAML: |
    pip: {packages: ["requests==2.26.0"], pip_check: false}
  rayClusterSpec:
    headGroupSpec: {rayStartParams: {dashboard-host: 0.0.0.0}, template: {spec: {containers: [{name: h,
        image: "rayproject/ray:2.9.0", resources: {limits: {cpu: "1", nvidia.com/gpu: 1}}}]}}}
""",
        """
apiVersion: ray.io/v1
kind: RayJob
metadata: {name: elsewhere}
spec: {entrypoint: "python far.py", clusterSelector: {ray.io/cluster: shared}, entrypointNumGpus: 0.5,
    entrypointNumCpus: 2, submissionMode: HTTPMode}
""",
        """
apiVersion: ray.io/v1
kind: RayJob
metadata: {name: broken}
spec: {entrypoint: "python b.py", runtimeEnvYAML: "a: [", suspend: true, ttlSecondsAfterFinished: 60,
    shutdownAfterJobFinishes: true}
---
apiVersion: ray.io/v1
kind: RayCluster
metadata: {name: beside}
spec: {}
""",
    ),
    "Workflow": (
        """
apiVersion: argoproj.io/v1alpha1
kind: Workflow
metadata: {generateName: hpo-, namespace: argo}
spec:
  entrypoint: pipeline
  serviceAccountName: runner
  onExit: tell
  arguments: {parameters: [{name: epochs, value: "10"}]}
  templates:
    - name: pipeline
      dag:
        tasks:
          - {name: prepare, template: prepare}
          - {name: train, template: train, depends: prepare.Succeeded, withItems: [0.1, 0.01],
              arguments: {parameters: [{name: lr, value: "{{item}}"}]}}
          - {name: judge, template: train, dependencies: [train],
              when: "{{tasks.train.outputs.result}} > 0.9", arguments: {parameters: [{name: lr, value: 0}]}}
    - name: prepare
      script: {image: "python:3.11", command: [python], source: "print('{{workflow.parameters.epochs}}')"}
    - name: train
      inputs: {parameters: [{name: lr}], artifacts: [{name: data, path: /data, s3: {key: data}}]}
      container: {image: i, command: [sh, -c], args: ["python t.py {{inputs.parameters.lr}}"],
          resources: {limits: {nvidia.com/gpu: 1}}}
    - {name: tell, http: {url: "https://example.org"}}
""",
        """
apiVersion: argoproj.io/v1alpha1
kind: Workflow
metadata: {name: inline}
spec:
  entrypoint: main
  activeDeadlineSeconds: 60
  templates:
    - name: main
      steps:
        - [{name: one, inline: {container: {image: i, command: [python, one.py]}}}]
        - [{name: far, templateRef: {name: library, template: train}}]
""",
        """
apiVersion: argoproj.io/v1alpha1
kind: Workflow
metadata: {name: referred}
spec: {workflowTemplateRef: {name: library}}
""",
    ),
    "WorkflowTemplate": (
        """
apiVersion: argoproj.io/v1alpha1
kind: WorkflowTemplate
metadata: {name: library}
spec:
  templates:
    - {name: train, container: {image: i, command: [python, train.py]}}
    - {name: judge, inputs: {parameters: [{name: of}]}, container: {image: i, command: [python,
        "{{inputs.parameters.of}}"]}}
    - {name: both, containerSet: {containers: [{name: a, image: i}]}}
""",
        """
apiVersion: argoproj.io/v1alpha1
kind: WorkflowTemplate
metadata: {name: whole}
spec: {entrypoint: go, templates: [{name: go, container: {image: i, command: [python, go.py]}}]}
""",
        """
apiVersion: argoproj.io/v1alpha1
kind: WorkflowTemplate
metadata: {name: none}
spec: {templates: [{name: wait, suspend: {}}]}
""",
    ),
}
MANIFESTS["ClusterWorkflowTemplate"] = tuple(
    text.replace("kind: WorkflowTemplate", "kind: ClusterWorkflowTemplate")
    for text in MANIFESTS["WorkflowTemplate"]
)
MANIFESTS["CronWorkflow"] = tuple(
    f"""
apiVersion: argoproj.io/v1alpha1
kind: CronWorkflow
metadata: {{name: nightly-{number}}}
spec: {{{when}, workflowSpec: {{entrypoint: go, templates: [{{name: go, container: {{image: i,
    command: [python, go.py]}}}}]}}}}
"""
    for number, when in enumerate(
        (
            'schedule: "0 3 * * *"',
            'schedules: ["@daily"], timezone: UTC',
            "schedule: '@hourly', suspend: true",
        )
    )
)

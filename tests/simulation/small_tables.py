"""Small tables of our own in the place of the measured ones, so that generators and job models run without
any data."""

from pathlib import Path

STEPS = """placement,local_bsz,step_time,sync_time
1,8,0.5,0.0
1,32,2.0,0.0
2,8,0.6,0.1
2,32,2.1,0.1
11,8,1.0,0.5
11,32,2.5,0.5
"""
PODS = """name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,\
creation_time,deletion_time,scheduled_time
a,8000,1024,1,1000,,LS,Running,0,700,100
b,24000,1024,4,1000,,LS,Running,0,1100,100
c,4000,1024,1,460,,LS,Running,0,400,100
d,64000,1024,8,1000,,LS,Running,0,400,100
e,12000,1024,0,0,,LS,Running,0,700,100
f,96000,1024,0,0,,LS,Running,0,400,100
g,8000,1024,1,1000,,LS,Pending,0,700,
"""
"""d is larger than a node of CODA's, g never ran."""
MODELS = [
    "alexnet",
    "bert",
    "deepspeech",
    "gnmt",
    "lstm",
    "m5",
    "mobilenet",
    "res18",
    "res50",
    "shufflenet",
    "transformer",
    "vae",
]


def write_tables(root: Path) -> Path:
    """Below `root`, as the data sets lie below PENSTOCK_DATA."""
    for model in ("bert", "cifar10", "deepspeech2", "imagenet", "ncf", "yolov3"):
        folder = root / "pollux/traces" / model
        folder.mkdir(parents=True)
        (folder / "placements.csv").write_text(STEPS)
        (folder / "scalability.csv").write_text("num_nodes,num_replicas,local_bsz,step_time,sync_time\n")
        for batch in (8, 64):
            rows = "progress,iteration,metric,grad_sqr,grad_var\n10,1,0.1,1,0\n20,2,0.5,1,0\n"
            (folder / f"validation-{batch}.csv").write_text(rows)
    files = {
        "muri/stage_profiles.csv": "model,num_gpu,batch_size,iteration_ms,storage_cpu_ms,gpu_ms,network_ms,"
        "startup_overhead_s\n"
        + "".join(
            f"vgg16,{gpus},16,{ms},50,40,{gpus},7\n"
            for gpus, ms in ((1, 100), (2, 150), (4, 200), (8, 300), (16, 400))
        ),
        "charrnn/charrnn_x_error.csv": "x_1,x_2,x_3\n4,8,5\n2,6,3\n1,5,2\n",
        "openb/openb_pod_list_default.csv": PODS,
        "synergy/cpu_mem_sensitivity.csv": "cpu_gpu_ratio_dir,model,num_gpu,cpus,mem_gb,relative_tput\n"
        + "".join(f"models,{model},1,1,250,0.5\nmodels,{model},1,24,250,2\n" for model in MODELS),
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root

// A hollow kubelet: the real kubelet without containers, for tests. It admits, reports, resizes and ends pods
// as on a machine. Unlike Kubernetes' own kubemark, it opens no port, keeps its files in one folder, leaves the
// firewall alone and carries resizes out; its cores, memory and boot id are given. Two annotations of a pod end
// its containers by themselves: penstock.test/run-for (500ms after the start of each) and
// penstock.test/exit-code.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	cadvisorapi "github.com/google/cadvisor/info/v1"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	clientset "k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	cliflag "k8s.io/component-base/cli/flag"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	apitest "k8s.io/cri-api/pkg/apis/testing"
	"k8s.io/klog/v2"
	kubeletconfig "k8s.io/kubernetes/pkg/kubelet/apis/config"
	cadvisortest "k8s.io/kubernetes/pkg/kubelet/cadvisor/testing"
	"k8s.io/kubernetes/pkg/kubelet/cm"
	"k8s.io/kubernetes/pkg/kubemark"
	"k8s.io/utils/ptr"
)

const (
	runFor   = "penstock.test/run-for"
	exitCode = "penstock.test/exit-code"
	sigterm  = 128 + 15 // a program that does not handle SIGTERM
)

// machine is what the kubelet reads of its hardware.
type machine struct {
	cadvisortest.Fake
	info cadvisorapi.MachineInfo
}

func (m *machine) MachineInfo() (*cadvisorapi.MachineInfo, error) {
	info := m.info
	return &info, nil
}

// noCgroups has each pod's limits as they shall be.
type noCgroups struct {
	cm.ContainerManager
}

func (n noCgroups) NewPodContainerManager() cm.PodContainerManager {
	return podWithoutCgroup{n.ContainerManager.NewPodContainerManager()}
}

type podWithoutCgroup struct {
	cm.PodContainerManager
}

func (podWithoutCgroup) GetPodCgroupConfig(pod *v1.Pod, _ v1.ResourceName) (*cm.ResourceConfig, error) {
	found := cm.ResourceConfigForPod(pod, true, cm.QuotaPeriod, false, kubeletconfig.NoneMemoryReservationPolicy)
	if found.Memory == nil { // a cgroup has a value for each limit, also where the pod has none
		found.Memory = ptr.To(int64(-1))
	}
	if found.CPUQuota == nil {
		found.CPUQuota, found.CPUPeriod = ptr.To(int64(-1)), ptr.To(uint64(cm.QuotaPeriod))
	}
	return found, nil
}

func (podWithoutCgroup) SetPodCgroupConfig(klog.Logger, *v1.Pod, *cm.ResourceConfig) error {
	return nil
}

// runtime is a container runtime whose containers end.
type runtime struct {
	*apitest.FakeRuntimeService
}

func (r *runtime) CreateContainer(
	ctx context.Context, sandbox string, config *runtimeapi.ContainerConfig, podConfig *runtimeapi.PodSandboxConfig,
) (string, error) {
	id, err := r.FakeRuntimeService.CreateContainer(ctx, sandbox, config, podConfig)
	if err == nil {
		err = r.UpdateContainerResources(ctx, id, &runtimeapi.ContainerResources{Linux: config.GetLinux().GetResources()})
	}
	return id, err
}

func (r *runtime) UpdateContainerResources(
	_ context.Context, id string, resources *runtimeapi.ContainerResources,
) error {
	r.Lock()
	defer r.Unlock()
	container, found := r.Containers[id]
	if !found {
		return fmt.Errorf("no container %q", id)
	}
	container.Resources = resources
	return nil
}

func (r *runtime) StartContainer(ctx context.Context, id string) error {
	if err := r.FakeRuntimeService.StartContainer(ctx, id); err != nil {
		return err
	}
	r.Lock()
	defer r.Unlock()
	sandbox, found := r.Sandboxes[r.Containers[id].SandboxID]
	if !found {
		return nil
	}
	if runs, err := time.ParseDuration(sandbox.Annotations[runFor]); err == nil {
		code, _ := strconv.Atoi(sandbox.Annotations[exitCode])
		time.AfterFunc(runs, func() { r.end(id, int32(code)) })
	}
	return nil
}

func (r *runtime) StopContainer(_ context.Context, id string, _ int64) error {
	r.end(id, sigterm)
	return nil
}

func (r *runtime) StopPodSandbox(ctx context.Context, id string) error {
	r.Lock()
	var members []string
	for name, container := range r.Containers {
		if container.SandboxID == id {
			members = append(members, name)
		}
	}
	r.Unlock()
	for _, name := range members {
		r.end(name, sigterm)
	}
	return r.FakeRuntimeService.StopPodSandbox(ctx, id)
}

// end changes nothing of a container that has ended before.
func (r *runtime) end(id string, code int32) {
	r.Lock()
	defer r.Unlock()
	if container, found := r.Containers[id]; found &&
		container.State == runtimeapi.ContainerState_CONTAINER_RUNNING {
		container.State = runtimeapi.ContainerState_CONTAINER_EXITED
		container.FinishedAt = time.Now().UnixNano()
		container.ExitCode = code
	}
}

func main() {
	labels, devices := map[string]string{}, map[string]string{}
	boundLabels, boundDevices := cliflag.ConfigurationMap(labels), cliflag.ConfigurationMap(devices)
	name := flag.String("name", "", "name of the node")
	kubeconfig := flag.String("kubeconfig", "", "file")
	folder := flag.String("folder", "", "existing folder for its files")
	bootID := flag.String("boot-id", "", "a new one: the machine has booted")
	cores := flag.Int("cores", 1, "CPU cores")
	memory := flag.Uint64("memory-mib", 4096, "MiB")
	maxPods := flag.Int("max-pods", 110, "pods at the same time")
	lease := flag.Int("lease-seconds", 40, "it renews its lease, and reports, four times in this time")
	flag.Var(&boundLabels, "labels", "NAME=VALUE,…")
	flag.Var(&boundDevices, "devices", "RESOURCE=COUNT,…, such as nvidia.com/gpu=4")
	flag.Parse()
	if err := run(*name, *kubeconfig, *folder, *bootID, *cores, *memory, *maxPods, *lease, labels, devices); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(
	name, kubeconfig, folder, bootID string, cores int, memory uint64, maxPods, lease int,
	labels, devices map[string]string,
) error {
	flags, config := kubemark.GetHollowKubeletConfig(
		&kubemark.HollowKubeletOptions{NodeName: name, MaxPods: maxPods, NodeLabels: labels})
	os.RemoveAll(flags.RootDirectory) // made in /tmp
	flags.RootDirectory = filepath.Join(folder, "root")
	config.StaticPodPath, config.PodLogsDir = filepath.Join(folder, "static"), filepath.Join(folder, "logs")
	config.VolumePluginDir = filepath.Join(folder, "plugins")
	for _, place := range []string{flags.RootDirectory, config.StaticPodPath, config.PodLogsDir} {
		if err := os.MkdirAll(place, 0o700); err != nil {
			return err
		}
	}
	config.EnableServer = false
	config.MakeIPTablesUtilChains = false // the machine's own firewall
	config.NodeLeaseDurationSeconds = int32(lease)
	config.NodeStatusUpdateFrequency.Duration = time.Duration(lease) * time.Second / 4

	client, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	client.UserAgent, client.QPS = "hollow-kubelet", -1 // a test waits for each of its reports
	calls, err := clientset.NewForConfig(client)
	if err != nil {
		return err
	}
	client.Timeout = 10 * time.Second // as for a usual lease
	heartbeats, err := clientset.NewForConfig(client)
	if err != nil {
		return err
	}
	extended := v1.ResourceList{}
	for device, count := range devices {
		quantity, err := resource.ParseQuantity(count)
		if err != nil {
			return fmt.Errorf("%s: %w", device, err)
		}
		extended[v1.ResourceName(device)] = quantity
	}
	hardware := &machine{Fake: cadvisortest.Fake{NodeName: name}, info: cadvisorapi.MachineInfo{
		NumCores: cores, MemoryCapacity: memory << 20, BootID: bootID, MachineID: name, SystemUUID: name,
		InstanceID: cadvisorapi.InstanceID(name),
	}}
	containers := apitest.NewFakeRuntimeService()
	containers.FakeStatus = &runtimeapi.RuntimeStatus{Conditions: []*runtimeapi.RuntimeCondition{
		{Type: runtimeapi.RuntimeReady, Status: true}, {Type: runtimeapi.NetworkReady, Status: true},
	}}
	kubelet := kubemark.NewHollowKubelet(
		flags, config, calls, heartbeats, hardware, apitest.NewFakeImageService(),
		&runtime{containers}, noCgroups{cm.NewStubContainerManagerWithDevicePluginResource(extended)})
	klog.InfoS("Starting", "node", name, "cores", cores, "devices", devices)
	kubelet.Run(context.Background())
	return nil
}

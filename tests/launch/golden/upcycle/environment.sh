export MOEKIT_DEVICE=gpu
export MOEKIT_MEGATRON=/fsx/moekit/Megatron-LM
export MOEKIT_LIBRARY_PATH=/opt/amazon/ofi-nccl/lib:/opt/amazon/efa/lib
unset -v MOEKIT_SETUP_SCRIPT
unset -v MOEKIT_HASH_TABLE
unset -v MOEKIT_ROUTING_TRACE_LAST_ITERS
unset -v MOEKIT_DIAGNOSE_INTERVAL
unset -v MOEKIT_KEEP_LAST
unset -v MOEKIT_KEEP_EVERY
unset -v MOEKIT_PROFILED_NODES
export NCCL_NET_PLUGIN=ofi
export FI_PROVIDER=efa
export FI_EFA_USE_DEVICE_RDMA=1
export NCCL_SOCKET_IFNAME='^lo,docker0,veth_def_agent'
export NCCL_DEBUG=INFO
export NVTE_ALLOW_NONDETERMINISTIC_ALGO=1

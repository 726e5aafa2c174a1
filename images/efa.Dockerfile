# The same image as build_efa.sh makes, for docker, Hugging Face Jobs and Kubernetes; install_efa.sh does the work in
# both. From this folder:
#
#   docker build -f efa.Dockerfile -t pytorch-efa:26.06 .
#
# Its versions are those of versions.env.
FROM nvcr.io/nvidia/pytorch:26.06-py3
ARG EFA_INSTALLER=1.49.0
ARG AWS_OFI_NCCL=v1.19.2
COPY install_efa.sh /tmp/install_efa.sh
RUN bash /tmp/install_efa.sh "$EFA_INSTALLER" "$AWS_OFI_NCCL" && rm /tmp/install_efa.sh
# by the plugin's name: as a path, NCCL makes no library's name of it (handbook 2.2)
ENV LD_LIBRARY_PATH=/opt/amazon/ofi-nccl/lib:/opt/amazon/efa/lib:$LD_LIBRARY_PATH NCCL_NET_PLUGIN=ofi

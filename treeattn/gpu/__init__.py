"""Cards of several ranks that are joined without the host: by NCCL or RCCL, or reading each other's memory."""

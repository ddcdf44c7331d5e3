"""Files of hubs and of other servers, downloaded to this machine: resumed, and verified."""

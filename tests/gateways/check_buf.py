# node: @bufbuild/buf==1.75.0

# packages: litellm[proxy]==1.106.2 openai==2.54.0
